"""What a program looks like while JAX traces it: calls, moves and parts as equations of a jaxpr."""
