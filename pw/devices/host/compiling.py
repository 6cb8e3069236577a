"""Compiles StableHLO artifacts before programs that need them are installed.

Clients ask before they register a program (`Compile`). The controller asks before a client moves here
(`CompileAhead`). The executable stays for a while, so that a program which is installed soon after shares
it. A lost client leaves nothing; a lost controller leaves no compilation ahead.

    asked -compiled-> kept -KEPT_S or AHEAD_S, or KEPT of the same client are newer-> dropped
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import Error, ErrorReport, HostLost, ProtocolError
from pw.core.ids import CONTROL, CONTROLLER, Address, client_id
from pw.core.programs.spec_checks import check_devices
from pw.core.programs.stablehlo import Facts
from pw.core.sharding import DeviceAddress
from pw.devices.host.backend import Backend
from pw.devices.host.clients import Clients

KEPT_S = 60.0
"""Seconds that an executable stays without a program."""

AHEAD_S = 600.0
"""Seconds that an executable stays for a client that is to move here: its launched calls have to end first."""

KEPT = 256
"""Executables that stay for one client; one more drops the oldest."""

WAITING = 1024
"""Compilations that one client may wait for; the host refuses more."""


@dataclass(frozen=True, slots=True)
class _Expired:
    """Timer: drop an executable that was kept for a program."""

    owner: str
    key: bytes


Described = Facts | str | dict[str, float]
"""Description of an executable, in one of the details of `Compile`."""


_AHEAD = f"{CONTROLLER}/"


def _ahead_of(client: int) -> str:
    """Return the owner of what is compiled ahead for a client; no node has such a name."""
    return f"{_AHEAD}{client}"


class Compilations(Part):
    """Answers `Compile` and `CompileAhead`.

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
        """Keys of the compilations that have not ended, by owner and request; an owner is the node of a
        client, or what `_ahead_of` returns."""
        self._kept: dict[str, dict[bytes, None]] = {}
        """Keys of the executables that are kept, by owner; the oldest first."""

    def __len__(self) -> int:
        return len(self._waiting) + sum(map(len, self._kept.values()))

    @handles(msg.Compile)
    def _compile(self, sender: Address, message: msg.Compile) -> None:
        client = self._clients.at(sender.node)
        if client is None:
            self._env.send(sender, msg.RequestFailed(message.request, self._clients.refusal()))
            return

        def answer(result: Described | ErrorReport) -> None:
            if isinstance(result, ErrorReport):
                self._env.send(sender, msg.RequestFailed(message.request, result))
            else:
                self._env.send(sender, _answer(message.request, result))

        self._begin(sender.node, client, message, message.detail, KEPT_S, answer)

    @handles(msg.CompileAhead)
    def _compile_ahead(self, sender: Address, message: msg.CompileAhead) -> None:
        if sender.node != CONTROLLER:
            self._env.count("messages_refused")
            return

        def answer(result: Described | ErrorReport) -> None:
            if isinstance(result, ErrorReport):  # the program's installation will say so
                self._env.log("info", "not compiled ahead", client=client, why=result.message)
            else:
                self._env.count("compiled_ahead")
            self._env.send(CONTROL, msg.CompiledAhead(message.request))

        client = message.client
        if client in self._clients.gone_clients:
            self._env.send(CONTROL, msg.CompiledAhead(message.request))
            return
        self._begin(_ahead_of(client), client, message, msg.Detail.FACTS, AHEAD_S, answer)

    def _begin(
        self,
        owner: str,
        client: int,
        message: msg.Compile | msg.CompileAhead,
        detail: msg.Detail,
        kept_s: float,
        answer: Callable[[Described | ErrorReport], None],
    ) -> None:
        """Compile what a message asks for, keep it, and then call `answer`."""
        refusal = self._objection(owner, message.devices, (message.island, message.epoch))
        if refusal is not None:
            answer(ErrorReport.of(refusal, self._env.address.node))
            return
        self._serial += 1
        key = f"{client_id(client, 0)}/compile/{self._serial}".encode()
        request = (owner, message.request)
        self._waiting[request] = key

        def compiled(result: Described | ErrorReport) -> None:
            if self._waiting.get(request) != key:
                # The client is lost, or does not want it any more.
                self._backend.forget(key)  # also if it was made just before it was released
                return
            del self._waiting[request]
            if not isinstance(result, ErrorReport):
                self._keep(owner, key, kept_s)
            answer(result)

        self._backend.compile(key, message.artifact, message.devices, detail, compiled)

    def _objection(
        self, owner: str, devices: tuple[DeviceAddress, ...], place: tuple[str, int]
    ) -> Exception | None:
        """Return why nothing is compiled for these devices."""
        if place != self.place:
            # The client hears of the new binding, and asks its hosts.
            return HostLost("a function was to be compiled for an island that was formed again")
        if sum(other == owner for other, _ in self._waiting) >= self.most_waiting:
            return ProtocolError(
                f"more than {self.most_waiting} functions are being compiled for one client; wait for some"
            )
        try:
            check_devices(devices, self._env.address.node, *self.devices)
        except Error as error:
            return error
        return None

    def _keep(self, owner: str, key: bytes, kept_s: float) -> None:
        kept = self._kept.setdefault(owner, {})
        kept[key] = None
        self._env.call_later(kept_s, _Expired(owner, key))
        if len(kept) > self.most_kept:
            self._drop(owner, next(iter(kept)))

    @handles(_Expired)
    def _expired(self, sender: Address, note: _Expired) -> None:
        self._drop(note.owner, note.key)

    def _drop(self, owner: str, key: bytes) -> None:
        kept = self._kept.get(owner, {})
        if key in kept:
            del kept[key]
            if not kept:
                del self._kept[owner]
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
        self._forget(message.node)
        if message.node == CONTROLLER:  # another one prepares moves anew
            owners = (*self._kept, *(owner for owner, _ in self._waiting))
            for owner in {one for one in owners if one.startswith(_AHEAD)}:
                self._forget(owner)

    def forget_client(self, client: int, nodes: Iterable[str]) -> None:
        """Drop all that is kept for a client that has left, and compiled for its `nodes`."""
        for owner in (_ahead_of(client), *nodes):
            self._forget(owner)

    def _forget(self, owner: str) -> None:
        for request in [request for request in self._waiting if request[0] == owner]:
            self._release(request)
        for key in list(self._kept.get(owner, ())):
            self._drop(owner, key)


def _answer(request: int, detail: Described) -> msg.Compiled:
    if isinstance(detail, Facts):
        return msg.Compiled(request, facts=detail)
    if isinstance(detail, str):
        return msg.Compiled(request, text=detail)
    return msg.Compiled(request, costs=detail)
