"""Passes that rewrite the jaxpr of a program."""
