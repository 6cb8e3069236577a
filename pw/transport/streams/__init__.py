"""Bytes between two processes, plain or encrypted, without an event loop and without blocking."""
