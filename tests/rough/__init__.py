"""Runs the tests where machines differ: `python -m tests.rough`, and as a part of `make long`.

    python -m tests.rough                                   all tests, under each condition
    python -m tests.rough --only slowed tests/cli -x        one condition; the rest is for pytest
    python -m tests.rough --only slowed --seed 7 tests/cli  the same again

Conditions:

    background  as of `nohup make test &` in a script of a service: signals ignored and blocked, no standard
                input, no home, a strict umask, low limits, and variables that mislead
    terminal    at a terminal: no umask, high limits, another locale and time zone, and variables that mislead
    busy        beside four busy loops
    single      on one processor
    slowed      processes of the run stop for 0.2 s, chosen at random
    clock       the wall clock jumps by up to eight minutes, twice a second (`time.monotonic` does not)

It prints the seed, and for a condition that fails the command that repeats it. Its last lines say how
each condition ended.
"""
