"""The device backend on JAX: compiling, enqueueing and moving arrays, each on threads of its own."""
