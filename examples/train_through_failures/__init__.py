"""The language model of `examples.train_lm`, trained while its hosts are killed at random.

Read `training` first: an ordinary loop, with one line about failures. `chaos` kills hosts.
`__main__` trains twice, without and with kills, and compares the losses bit for bit.

Run it: `python -m examples.train_through_failures`.
"""
