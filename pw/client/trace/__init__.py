"""From Python functions to programs: jit, pmap, program, host functions."""
