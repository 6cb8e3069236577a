"""Fuzz targets: one for each decoder that takes bytes from other processes, files or clients' code.

A target has valid inputs (its seeds). The mutator changes them, and the target takes the result: it may raise
the errors that it promises, and nothing else. Everything is decided by a seed, so each failure can be repeated.

    python -m tests.fuzz                     all targets, as many inputs as `make test` gives them
    python -m tests.fuzz --inputs 10000000   many more, with the most time and memory of one input
    python -m tests.fuzz frames zmtp         only these targets

An input that fails is written to `tests/fuzz/seeds/TARGET/`. The files there run first, for ever.
"""
