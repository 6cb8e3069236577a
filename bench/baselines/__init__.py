"""The systems that pw is compared with, in processes that are idle between readings."""
