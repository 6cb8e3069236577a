"""The gang scheduler of one island: programs, queues, policy, window, admission, launches."""
