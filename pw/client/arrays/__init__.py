"""Handles of arrays, and the virtual devices that they lie on."""
