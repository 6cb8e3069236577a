"""A byte-level language model trained as a pipeline over two islands.

Read in this order: `corpus` (the text), `model` (plain JAX, cut in two), `pipeline` (one program
that runs a training step on two islands), `reference` (the same training on one device, as a
check), `__main__` (the command).

Run it: `python -m examples.train_lm`.
"""
