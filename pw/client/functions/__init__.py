"""What users call: `pw.jit`, `pw.pmap`, `pw.program`, `pw.cond`, `pw.grad`, `pw.put`, host functions."""
