"""Checkpoints in host memory and on disk."""
