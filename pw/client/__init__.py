"""What a user touches: connecting, arrays, jit, pmap and program, local clusters."""
