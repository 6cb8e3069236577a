"""Tests the devices of a host, and says which are sick.

    well -an error names it-> suspect -its test ends-> well, or failed
    well, suspect -its test fails-> failed -its test passes-> well

An error that names a device makes it suspect, and all devices of the host are tested once; this is done at
most once a minute, whatever a client's computations raise. A test that comes to no end changes nothing, and
is repeated after a minute while a device is suspect. All that ask while a test runs get its outcome. The
controller keeps the states beyond this incarnation: it tells them to the next one, and has it tested
(`pw.sched.control.device_health`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.ticker import Ticker
from pw.core.ids import CONTROL, CONTROLLER, Address
from pw.devices.host.backend import Backend

AGAIN_S = 60.0
"""Seconds from one test because of an error to the next."""

ANSWER_S = 8.0
"""Seconds after which a question is answered without the devices whose test has not ended."""

BUSY_S = 10.0
"""Seconds after which a busy host looks again whether it is idle."""


class DeviceHealth(Part):
    """The tests of a host's devices.

    Args:
        env: the store's.
        backend: tests devices, and hears of errors that name some.
        every_s: seconds from one test of an idle host to the next; 0 for none.
    """

    def __init__(self, env: Env, backend: Backend, every_s: float = 0.0) -> None:
        self._env = env
        self._backend = backend
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether the host has launches in flight."""
        self._count = 0
        """Number of devices of the host; 0 until it has joined an island."""
        self._states: dict[int, msg.SickDevice] = {}
        """Devices that are suspect or have failed, by ordinal."""
        self._outcomes: dict[int, msg.DeviceTest] = {}
        """Outcomes of the test that runs, by ordinal."""
        self._is_testing = False
        self._askers: list[int] = []
        """Questions that wait for the end of the test."""
        self._suspicion_s = -math.inf
        """Time of the last test because of an error, in seconds of the clock."""
        self._again = Ticker(env, AGAIN_S, self.test_suspects)
        self._regular = Ticker(env, every_s, self._test_if_idle) if every_s else None

    def joins(self, devices: int) -> None:
        """Take the number of devices of this host, which are open from now on."""
        self._count = devices
        self._backend.take_suspicions(devices, self._suspect)
        self.announce()
        if self._regular is not None:
            self._regular.start()

    def announce(self) -> None:
        """Tell a controller that may not know it which devices are sick."""
        if self._states:
            self._tell()

    def _tell(self) -> None:
        self._env.send(CONTROL, msg.HostDevices(tuple(self._states.values())))

    # --- reasons for a test -------------------------------------------------------------------------

    @handles(msg.TestHost)
    def _asked(self, sender: Address, message: msg.TestHost) -> None:
        if sender.node != CONTROLLER:
            self._env.count("messages_refused")
            return
        for one in message.sick:
            self._states.setdefault(one.device, one)
        if message.request:
            self._askers.append(message.request)
            self._env.call_later(ANSWER_S, partial(self._answer_late, message.request))
        self._begin()

    def _suspect(self, devices: Collection[int], word: str) -> None:
        """An error has named devices."""
        fresh = [device for device in devices if device not in self._states]
        for device in fresh:
            words = f"an error of XLA names it ({word})"
            self._states[device] = msg.SickDevice(device, msg.SickState.SUSPECT, words)
            self._env.count("devices_suspected")
            self._env.log("warning", "device is suspect", device=device, reason=words)
        if fresh:
            self._tell()
        if not self._is_testing:
            waits_s = self._suspicion_s + AGAIN_S - self._env.now_s()
            if waits_s > 0:
                self._again.start(waits_s)
            else:
                self.test_suspects()

    def test_suspects(self) -> bool:
        """Test all devices because of an error, and note when."""
        self._suspicion_s = self._env.now_s()
        self._begin()
        return False

    def _test_if_idle(self) -> bool:
        assert self._regular is not None
        if not self.is_busy():
            self._begin()
            return True
        self._regular.start(BUSY_S)
        return False

    # --- a test -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Test all devices at the same time, unless that is being done."""
        if self._is_testing:
            return
        self._is_testing = True
        self._env.count("device_tests")
        for device in range(self._count):
            self._backend.test(device, self.judge)
        if not self._count:
            self._end()

    def _end(self) -> None:
        """The tests of all devices have ended."""
        self._is_testing = False
        outcomes, self._outcomes = _in_order(self._outcomes), {}
        askers, self._askers = self._askers, []
        if any(one.state is msg.SickState.SUSPECT for one in self._states.values()):
            self._again.start(max(0.0, self._suspicion_s + AGAIN_S - self._env.now_s()))
        for request in askers:
            self._env.send(CONTROL, msg.HostTested(request, outcomes))

    def judge(self, test: msg.DeviceTest) -> None:
        """The test of a device has ended, one way or the other."""
        device, former = test.device, self._states.get(test.device)
        self._outcomes[device] = test
        if test.outcome is msg.DeviceOutcome.FAILED:
            self._states[device] = msg.SickDevice(device, msg.SickState.FAILED, test.words)
            self._env.count("device_tests_failed")
            self._env.log("error", "device failed its test", device=device, reason=test.words)
        elif test.outcome is msg.DeviceOutcome.OK and former is not None:
            del self._states[device]
            self._env.log("info", "device passed its test", device=device, before=former.state)
        elif former is not None:
            self._env.log("warning", "device was not tested", device=device, reason=test.words)
        if self._states.get(device) != former:
            self._tell()
        if len(self._outcomes) == self._count:
            self._end()

    def _answer_late(self, request: int) -> None:
        """Answer a question with the tests that have ended."""
        if request in self._askers:
            self._askers.remove(request)
            words = f"no end within {ANSWER_S:g} s: the device is busy, or hangs; see pw why"
            late = {
                device: msg.DeviceTest(device, msg.DeviceOutcome.UNTESTED, words)
                for device in range(self._count)
                if device not in self._outcomes
            }
            self._env.send(CONTROL, msg.HostTested(request, _in_order(self._outcomes | late)))


def _in_order(outcomes: dict[int, msg.DeviceTest]) -> tuple[msg.DeviceTest, ...]:
    return tuple(outcomes[device] for device in sorted(outcomes))
