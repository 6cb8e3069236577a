"""Mixtures of experts: `pw.moe` sends each row to the experts that a router chooses, on any slices.

1. `layer`: `pw.moe`, and the computations and edges of a call.
2. `routing`: which rows go to which experts, and back.
"""
