"""A wall clock that jumps by up to eight minutes, in each interpreter that finds this file on its path.

All interpreters of a run jump at the same moments, as on a machine whose clock is set. A new certificate
is valid from ten minutes before on, so they jump by less. `time.monotonic` and `datetime.now` do not jump.
"""

import os
import random
import time

_EVERY_S = 0.5
_MOST_S = 480
_seed = os.environ.get("PW_TEST_CLOCK", "0")
_time, _time_ns, _monotonic = time.time, time.time_ns, time.monotonic


def _offset_s() -> int:
    moment = int(_monotonic() / _EVERY_S)  # the same in all processes of a machine
    return random.Random(f"{_seed} {moment}").randint(-_MOST_S, _MOST_S)


time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + _offset_s() * 10**9
