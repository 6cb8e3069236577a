"""A byte-level language model trained as a pipeline over two islands.

Read in this order: `corpus` (what it learns from), `model` (plain JAX, cut in two), `schedule`
(who computes what when, as a table), `pipeline` (the one program that runs a training step on two
islands), `reference` (the same training on one device, to check against), `__main__` (the
command).

Run it: `python -m examples.train_lm`.
"""
