"""The display: tables, notebooks, the line of a long wait, the output of host functions."""
