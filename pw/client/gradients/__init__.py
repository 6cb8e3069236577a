"""Gradients of programs: functions that call `pw.jit` functions on any slices.

1. `gradients`: `pw.grad` and `pw.value_and_grad`.
2. `tape`: records the calls of such a function, and walks them backwards.
3. `derivative`: makes two computations of a call, forward with residuals and backward.
"""
