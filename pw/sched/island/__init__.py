"""The gang scheduler of one island: its queue, window, policy and admission, and what it has
installed."""
