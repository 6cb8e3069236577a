"""Writes the nodes, inputs and outputs of a program as it is placed."""
