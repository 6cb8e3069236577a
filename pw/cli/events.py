"""`pw events`: prints what a controller publishes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from pw.cli import requests
from pw.core.errors import Error
from pw.core.events import TOPICS, VERSION, subject

LOST = "lost"
"""Value of `what` that stands for events of a topic that have not come here."""


def endpoint_of(address: str, timeout_s: float) -> str:
    """Return where the controller at an address publishes events. Raises Error if it does not."""
    with requests.connected(address, timeout_s) as session:
        endpoint = session.ask.status(timeout_s).events
    if not endpoint:
        raise Error(
            f"the controller at {address} publishes no events; start it with pw-controller --events ipc:///..."
        )
    return endpoint


def check_topics(topics: Sequence[str]) -> None:
    """Raise Error if there is no such topic."""
    for topic in topics:
        if topic not in TOPICS:
            raise Error(f"no topic {topic!r}; there are {', '.join(TOPICS)}")


def read(endpoint: str, topics: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Return events as they come, each with its `topic`, `number` and `time_s`; also those that were lost."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        for topic in topics or ("",):
            # The whole name of a topic is the prefix; none is the beginning of another one.
            socket.subscribe(subject(topic) if topic else f"pw.{VERSION}.")
        expected: dict[tuple[str, str], int] = {}
        while True:
            name, payload = socket.recv_multipart()
            batch = json.loads(payload)
            topic, key = name.decode().rpartition(".")[2], (name.decode(), batch["publisher"])
            lost = batch["first"] - expected.get(key, batch["first"])
            if lost:
                yield {"topic": topic, "what": LOST, "events": lost, "time_s": batch["time_s"]}
            for number, event in enumerate(batch["events"], batch["first"]):
                yield {"topic": topic, "number": number, "time_s": batch["time_s"], **event}
            expected[key] = batch["first"] + len(batch["events"])
    finally:
        context.destroy(linger=0)


def show(endpoint: str, topics: Sequence[str], *, as_json: bool, limit: int | None) -> None:
    """Print events until so many have come, or until Ctrl-C."""
    left = limit
    try:
        for event in read(endpoint, topics):
            sys.stdout.write((json.dumps(event) if as_json else line(event)) + "\n")
            sys.stdout.flush()
            if left is not None and (left := left - 1) <= 0:
                return
    except KeyboardInterrupt:
        return


def line(event: dict[str, Any]) -> str:
    """Return an event as one line: its time, topic, what has happened, and its fields."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["time_s"]))
    fields = [
        f"{name}={_words(value)}"
        for name, value in event.items()
        if name not in ("topic", "what", "number", "time_s") and value not in ("", [], None)
    ]
    millis = int(event["time_s"] % 1 * 1000)
    return f"{clock}.{millis:03d} {event['topic']:8} {event['what']:10} {' '.join(fields)}".rstrip()


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{name}:{amount}" for name, amount in value.items() if amount)
    return str(value)
