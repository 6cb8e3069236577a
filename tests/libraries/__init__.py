"""Scripts of libraries that do not know pw, beside plain JAX: `python -m tests.libraries`."""
