"""The systems that pw is compared with, each in processes that are idle until they have to measure."""
