"""Modules that a client compiles and runs."""
