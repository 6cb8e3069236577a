"""Processes on a host that run clients' Python functions; nothing here imports JAX."""
