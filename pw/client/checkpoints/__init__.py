"""Saving and restoring arrays: on hosts, and in files."""
