"""Compiles StableHLO artifacts for clients before they register programs with them.

The executable stays for a while, so that a program which is installed soon after shares it. A lost
client leaves nothing.

    asked -compiled-> kept -KEPT_S, or KEPT of the same client are newer-> dropped
"""

from __future__ import annotations

from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import Error, ErrorReport, HostLost, ProtocolError
from pw.core.ids import Address, client_id
from pw.core.programs.spec_checks import check_devices
from pw.core.programs.stablehlo import Facts
from pw.devices.host.backend import Backend
from pw.devices.host.clients import Clients

KEPT_S = 60.0
"""Seconds that an executable stays without a program."""

KEPT = 256
"""Executables that stay for one client; one more drops the oldest."""

WAITING = 1024
"""Compilations that one client may wait for; the host refuses more."""


@dataclass(frozen=True, slots=True)
class _Expired:
    """Timer: drop an executable that was kept for a program."""

    node: str
    key: bytes


class Compilations(Part):
    """Answers `Compile`.

    Args:
        env: the store's.
        backend: compiles.
        clients: the clients that this host knows.
        waiting: compilations that one client may wait for.
        kept: executables that are kept for one client.
    """

    def __init__(
        self, env: Env, backend: Backend, clients: Clients, waiting: int = WAITING, kept: int = KEPT
    ) -> None:
        self.most_waiting, self.most_kept = waiting, kept
        self._env = env
        self._backend = backend
        self._clients = clients
        self.place: tuple[str, int] = ("", 0)
        """The island and the epoch of this host."""
        self.devices: tuple[int, int] = (0, 0)
        """Number of devices of the island, and of this host."""
        self._serial = 0
        self._waiting: dict[tuple[str, int], bytes] = {}
        """The keys of the compilations that clients wait for, by node and request."""
        self._kept: dict[str, dict[bytes, None]] = {}
        """The keys of the executables that are kept, by the node of their client; the oldest first."""

    def __len__(self) -> int:
        return len(self._waiting) + sum(map(len, self._kept.values()))

    @handles(msg.Compile)
    def _compile(self, sender: Address, message: msg.Compile) -> None:
        client = self._clients.at(sender.node)
        if client is None:
            self._env.send(sender, msg.RequestFailed(message.request, self._clients.refusal()))
            return
        refusal: Exception | None = None
        if (message.island, message.epoch) != self.place:
            # The client hears of the new binding, and asks its hosts.
            refusal = HostLost("a function was to be compiled for an island that was formed again")
        elif sum(node == sender.node for node, _ in self._waiting) >= self.most_waiting:
            refusal = ProtocolError(
                f"more than {self.most_waiting} functions are being compiled for one client; wait for some"
            )
        else:
            try:
                check_devices(message.devices, self._env.address.node, *self.devices)
            except Error as error:
                refusal = error
        if refusal is not None:
            report = ErrorReport.of(refusal, self._env.address.node)
            self._env.send(sender, msg.RequestFailed(message.request, report))
            return
        self._serial += 1
        key = f"{client_id(client, 0)}/compile/{self._serial}".encode()
        request = (sender.node, message.request)
        self._waiting[request] = key

        def compiled(answer: Facts | str | dict[str, float] | ErrorReport) -> None:
            if (
                self._waiting.get(request) != key
            ):  # the client is lost, or does not want it any more
                self._backend.forget(key)  # also if it was made just before it was released
                return
            del self._waiting[request]
            if isinstance(answer, ErrorReport):
                self._env.send(sender, msg.RequestFailed(message.request, answer))
                return
            self._keep(sender.node, key)
            self._env.send(sender, _answer(message.request, answer))

        self._backend.compile(key, message.artifact, message.devices, message.detail, compiled)

    def _keep(self, node: str, key: bytes) -> None:
        kept = self._kept.setdefault(node, {})
        kept[key] = None
        self._env.call_later(KEPT_S, _Expired(node, key))
        if len(kept) > self.most_kept:
            self._drop(node, next(iter(kept)))

    @handles(_Expired)
    def _expired(self, sender: Address, note: _Expired) -> None:
        self._drop(note.node, note.key)

    def _drop(self, node: str, key: bytes) -> None:
        kept = self._kept.get(node, {})
        if key in kept:
            del kept[key]
            if not kept:
                del self._kept[node]
            self._backend.forget(key)

    @handles(msg.CancelRequest)
    def _cancel(self, sender: Address, message: msg.CancelRequest) -> None:
        self._release((sender.node, message.request))

    def _release(self, request: tuple[str, int]) -> None:
        """Stop a compilation, which may take long or never end."""
        key = self._waiting.pop(request, None)
        if key is not None:
            self._backend.forget(key)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        self.forget_node(message.node)

    def forget_node(self, node: str) -> None:
        """Drop all that is kept for a lost client."""
        for request in [request for request in self._waiting if request[0] == node]:
            self._release(request)
        for key in list(self._kept.get(node, ())):
            self._drop(node, key)


def _answer(request: int, detail: Facts | str | dict[str, float]) -> msg.Compiled:
    if isinstance(detail, Facts):
        return msg.Compiled(request, facts=detail)
    if isinstance(detail, str):
        return msg.Compiled(request, text=detail)
    return msg.Compiled(request, costs=detail)
