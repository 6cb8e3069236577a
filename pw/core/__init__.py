"""The vocabulary every other folder speaks: ids, errors, messages, programs, and how they are lowered."""
