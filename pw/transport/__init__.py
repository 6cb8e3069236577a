"""Environments and networks: how actors on different nodes reach each other, and how buffers
travel."""
