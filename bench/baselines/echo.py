"""A bare zmq socket that echoes: the least that a round trip between two processes takes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Self

import zmq

from bench.baselines.peer import ROOT

PAYLOAD = bytes(100)  # about the size of a launch


class Echo:
    """A process that echoes, and a blocking socket to it over tcp on the loopback."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, "-m", "bench.baselines.echo", f"tcp://127.0.0.1:{port}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
        self.round_trip()

    def round_trip(self) -> None:
        """Send one message and receive it again."""
        self._socket.send(PAYLOAD)
        self._socket.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()
        self._socket.close()
        self._context.term()


def main() -> None:
    """Echo the messages from the address in the arguments until standard input ends."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(sys.argv[1])
    while True:
        socket.send(socket.recv())


if __name__ == "__main__":
    main()
