"""Walks the jaxpr of a program: which computation each equation belongs to, and on which mesh."""
