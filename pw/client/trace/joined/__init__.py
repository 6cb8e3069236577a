"""Values and functions over meshes that join islands, in programs; `pw.islands` cuts the functions."""
