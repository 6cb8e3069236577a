"""No other user of the machine gets into a cluster.

One script has a cluster that it embeds, and a local one. Here another user tries every socket on which any of
its processes listens, first as they are, and then with the doors held open.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pw.client.connection import threads
from pw.client.connection.runtime import Runtime
from tests.stages.daemons import Program
from tests.stages.programs import run_python

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="needs /proc"),
]

CLUSTERS = """
import sys, numpy as np, pw
x = pw.put(np.arange(3), pw.make_virtual_device_set().add_slice(devices=1).devices)
np.asarray(x)
cluster = pw.LocalCluster(allow_python=True, connect=False)
print("at", cluster.address, flush=True)
import signal
signal.pause()
"""

OTHER_USER = """
import os, socket, sys
from concurrent.futures import ThreadPoolExecutor
import encodings.ascii, encodings.idna, importlib.metadata
import numpy, uvloop, msgspec
import pw
from pw.client.connection import threads
from pw.client.connection.runtime import Runtime
from pw.core import messages
from pw.transport.bulk import plane as bulk
from pw.transport.links import network as stream_network

addresses, paths = eval(sys.argv[1]), eval(sys.argv[2])
os.setgroups([]); os.setgid(65534); os.setuid(65534)

def knock(path):
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(60)
        try:
            door.connect(path)
            told = door.recv(1000)
        except OSError as error:
            told = error.__class__.__name__.encode()
    return "socket " + told.decode("latin1")

def attach(address):
    try:
        Runtime(threads.remote(address), 1.0, 0, connect_s=2.0)
    except pw.Error as error:
        return "client " + type(error).__name__
    return "client attached"

with ThreadPoolExecutor(len(paths) + len(addresses)) as pool:  # all at once: most of it is waiting
    told = [pool.map(knock, paths), pool.map(attach, addresses)]
    print(*told[0], *told[1], sep="\\n")
"""


class Listening(NamedTuple):
    """What the processes of a program listen on."""

    tcp: list[str]
    unix: list[str]


def listening(pids: set[int]) -> Listening:
    """By the inodes of their sockets."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
            except FileNotFoundError:
                continue
            if found:
                inodes.add(found[1])
    tcp = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in inodes
    ]
    accepts = 0x10000
    unix = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & accepts and fields[6] in inodes:
            unix.append(fields[7] if len(fields) > 7 else "")
    return Listening(tcp, unix)


@pytest.fixture(scope="module")
def script() -> Iterator[Program]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o755)
        script = Program(Path(folder), ["-c", CLUSTERS], PW_EMBEDDED_DEVICES="1")
        try:
            script.until_says("at ", 90)
            yield script
        finally:
            script.kill()


@pytest.fixture(scope="module")
def doors(script: Program) -> list[str]:
    """All sockets on which the script's processes listen."""
    return listening(script.family()).unix


def controllers(doors: list[str]) -> list[str]:
    return [f"ipc://{path}" for path in doors if path.endswith("/controller")]


def test_every_door_is_in_a_private_directory_and_no_port_is_open(script: Program) -> None:
    found = listening(script.family())
    assert found.tcp == []
    # Two controllers, two hosts, and their bulk planes' shared memory: chunks come to the door of a host. The
    # plane of the embedding client, which has no door of links, has one for each.
    assert len(controllers(found.unix)) == 2
    assert len(found.unix) == 2 + 2 + 2 + 2
    assert script.out.split()[1] in controllers(found.unix)
    for path in found.unix:
        folder = Path(path).parent
        assert folder.stat().st_mode & 0o777 == 0o700, path
        assert folder.stat().st_uid == os.geteuid()


def try_as_another_user(doors: list[str]) -> list[str]:
    """What a process of another user gets, at every socket and as a client of every controller."""
    addresses = controllers(doors)
    arguments = [repr(each) for each in (addresses, doors)]
    tries = run_python(["-c", OTHER_USER, *arguments])
    assert tries.returncode == 0, tries.stderr
    return tries.stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_in_nowhere(doors: list[str]) -> None:
    assert try_as_another_user(doors) == [
        *(["socket PermissionError"] * len(doors)),
        *(["client ConnectionFailed"] * 2),
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_in_nowhere_even_if_all_doors_are_open(doors: list[str]) -> None:
    """Both planes ask the kernel who dials."""
    folders = {Path(path).parent for path in doors}
    try:
        for folder in folders:
            folder.chmod(0o755)
        for path in doors:
            os.chmod(path, 0o777)
        told = try_as_another_user(doors)
    finally:
        for folder in folders:
            folder.chmod(0o700)
    closed = {"socket ", "socket ConnectionResetError"}  # without a word
    assert len(told) == len(doors) + 2
    assert set(told[: len(doors)]) <= closed
    assert told[len(doors) :] == ["client ConnectionFailed"] * 2


def test_the_address_is_all_that_a_process_of_the_same_user_needs(doors: list[str]) -> None:
    for address in controllers(doors):
        session = Runtime(threads.remote(address), 1.0, 0, connect_s=60.0)
        assert session.ask.status(60.0).islands
        session.close()
