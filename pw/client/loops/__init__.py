"""Loops and maps over functions that call `pw.jit` functions on any slices."""
