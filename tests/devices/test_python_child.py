"""The process of clients' Python functions ends when its host ends, whatever it does then."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from typing import Any

import cloudpickle
import numpy as np
import pytest

from pw.core.functions.parts import HostPart
from pw.devices.python.wire import BeginFunction, FunctionCall, Load, ToHost
from pw.processes.child import Child, import_path, interpreter
from tests.stages.daemons import until

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def waits_for_ever(share: HostPart, *arrays: Any) -> list[Any]:
    threading.Event().wait()
    return []


@pytest.mark.parametrize("is_read", [True, False])
def test_it_ends_if_its_host_ends_in_the_middle_of_a_call(is_read: bool) -> None:
    """Also if the host has not read where it is: its socket is then reset, before the channel ends."""
    questions, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"PYTHONPATH": import_path()}
    begin = interpreter("pw.devices.python.entry", (), environment)
    child: Child[ToHost] = Child(begin, ToHost, np.empty)
    try:
        with questions:
            child.channel.send(BeginFunction(), descriptors=[answers.fileno()])
            answers.close()
            part = HostPart("f", 0, 1, (), (), ())
            child.channel.send(Load(b"k", cloudpickle.dumps(waits_for_ever), part))
            child.channel.send(FunctionCall(b"k"))

            def is_waiting() -> bool:
                questions.send(b"?")
                return b"waits_for_ever" in questions.recv(1 << 16)

            until(is_waiting, "the function")
            if not is_read:
                questions.send(b"?")
                assert select.select([questions], [], [], 60.0)[0]
        assert child.wait(60.0) == 0
    finally:
        child.stop()
