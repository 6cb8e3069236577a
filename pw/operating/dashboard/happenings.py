"""What happens in a cluster, as lines: from the controller's events, else from two statuses."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import zmq

from pw.core.events import subject
from pw.core.messages import Status
from pw.operating.dashboard.snapshot import Happening

TOPICS = ("island", "host", "client", "recovery")
KEPT = 10_000
"""Events that wait for the reader; the oldest are dropped."""
POLL_MS = 200

Heard = tuple[str, float, dict[str, Any]]
"""Topic of an event, the time at which it was published, in seconds since 1970, and the event."""


class EventThread:
    """Reads what a controller publishes; it keeps a bounded number of events."""

    def __init__(self, endpoint: str, wants_runs: bool) -> None:
        self._heard: deque[Heard] = deque(maxlen=KEPT)
        self._closing = threading.Event()
        topics = (*TOPICS, "run") if wants_runs else TOPICS
        self._thread = threading.Thread(
            target=self._main, args=(endpoint, topics), name="pw-events", daemon=True
        )
        self._thread.start()

    def _main(self, endpoint: str, topics: tuple[str, ...]) -> None:
        context = zmq.Context()
        try:
            socket = context.socket(zmq.SUB)
            socket.setsockopt(zmq.LINGER, 0)
            for topic in topics:
                socket.subscribe(subject(topic))
            socket.connect(endpoint)
            while not self._closing.is_set():
                if socket.poll(POLL_MS):
                    name, payload = socket.recv_multipart()
                    batch, topic = json.loads(payload), name.decode().rpartition(".")[2]
                    self._heard.extend((topic, batch["time_s"], one) for one in batch["events"])
        finally:
            context.destroy(linger=0)

    def take(self) -> list[Heard]:
        """Return the events that have come since the last time."""
        events = []
        while self._heard:
            events.append(self._heard.popleft())
        return events

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()


def words_of(topic: str, event: dict[str, Any]) -> str | None:
    """Return an event as a line; None for those that come all the time."""
    what = event["what"]
    if topic == "island":
        reason = f": {event['reason']}" if event["reason"] else ""
        count = len(event["hosts"])
        hosts = f" with {count} host{'s' * (count > 1)}" if count else ""
        return f"island {event['island']} is {what}{hosts}{_formed(event['epoch'])}{reason}"
    if topic == "host":
        return f"host {event['host']} {_HOST.get(what, what)}"
    if topic == "device":
        words = f"device {event['device']} of host {event['host']} {_DEVICE.get(what, what)}"
        return f"{words}: {event['reason']}" if what != "passed" else words
    if topic == "client":
        reason = f": {event['reason']}" if event["reason"] else ""
        return f"client {event['client']} ({event['name']}) {what}{reason}"
    if topic == "recovery":
        took = f" after {event['seconds']:.2f} s" if what == "ended" else ""
        who = f"client {event['client']} ({event['name']})"
        return f"the recovery of {who} {what}{took}, {event['arrays']} arrays lost"
    return None


def _formed(times: int) -> str:
    return f", formed {times} times" if times > 1 else ""


_HOST = {
    "registered": "has come",
    "ready": "is ready",
    "waiting": "waits for its island",
    "draining": "is draining",
    "gone": "is gone",
}

_DEVICE = {"suspect": "is suspect", "failed": "has failed its test", "passed": "is well again"}


def changes(before: Status, now: Status, time_s: float) -> Iterator[Happening]:
    """Yield what has changed from one status to the next."""
    for island in now.islands:
        former = next((one for one in before.islands if one.name == island.name), None)
        if former is None or (former.state, former.formed) != (island.state, island.formed):
            words = f"island {island.name} is {island.state}{_formed(island.formed)}"
            if island.missing:
                words += f", without {', '.join(island.missing)}"
            yield Happening(time_s, "island", island.state, words)
    hosts, former_hosts = _hosts(now), _hosts(before)
    for host in former_hosts.keys() - hosts.keys():
        yield Happening(time_s, "host", "gone", f"host {host} is gone")
    for host in hosts.keys() - former_hosts.keys():
        yield Happening(time_s, "host", "registered", f"host {host} has come")
    clients = {client.number: client.name for client in now.clients}
    former_clients = {client.number: client.name for client in before.clients}
    for number in clients.keys() - former_clients.keys():
        words = f"client {number} ({clients[number]}) attached"
        yield Happening(time_s, "client", "attached", words)
    for number in former_clients.keys() - clients.keys():
        words = f"client {number} ({former_clients[number]}) left"
        yield Happening(time_s, "client", "left", words)


def _hosts(status: Status) -> dict[str, int]:
    placed = [host for island in status.islands for host in island.hosts]
    return {host.name: host.pid for host in (*placed, *status.other_hosts)}
