"""The bases of all messages: which process may send a message to which actor.

Each message derives from the base of its route, or from those of several routes. A receiver is an
actor's name without what follows a slash.

An embedded cluster has the controller and a client in one process, called `controller`. So the
controller may also send what clients send.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from pw.core.messages.roles import Role

INLINE_BYTES = 8192
"""Bytes of the largest host value that travels inside a control message; larger ones take the bulk plane."""

_CLIENT: tuple[Role, ...] = (Role.CLIENT, Role.CONTROLLER)
_CONTROLLER: tuple[Role, ...] = (Role.CONTROLLER,)
_HOST: tuple[Role, ...] = (Role.WORKER,)


class Base(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""

    senders: ClassVar[tuple[Role, ...]] = ()
    """Roles of the processes that may send the message to an actor of another process."""
    receiver: ClassVar[str] = ""
    """Name of the actor that receives the message."""


class Local(Base, frozen=True):
    """A message that never leaves its process."""


class OnLink(Base, frozen=True):
    """A message between the transports of two processes, which no actor receives."""


class ClientToController(Base, frozen=True):
    """A message of a client to the controller."""

    senders, receiver = _CLIENT, "controller"


class ClientToStore(Base, frozen=True):
    """A message of a client to the store of a host."""

    senders, receiver = _CLIENT, "store"


class ClientToExecutor(Base, frozen=True):
    """A message of a client to the executor of a host."""

    senders, receiver = _CLIENT, "executor"


class ControllerToSession(Base, frozen=True):
    """A message of an actor of the controller process to a client."""

    senders, receiver = _CONTROLLER, "session"


class ControllerToExecutor(Base, frozen=True):
    """A message of an actor of the controller process to the executor of a host."""

    senders, receiver = _CONTROLLER, "executor"


class ControllerToStore(Base, frozen=True):
    """A message of an actor of the controller process to the store of a host."""

    senders, receiver = _CONTROLLER, "store"


class ControllerToCoordinator(Base, frozen=True):
    """A message of an actor of the controller process to the coordinator of a host."""

    senders, receiver = _CONTROLLER, "coordinator"


class HostToResources(Base, frozen=True):
    """A message of a host to the resource manager."""

    senders, receiver = _HOST, "resources"


class HostToScheduler(Base, frozen=True):
    """A message of a host to the scheduler of its island."""

    senders, receiver = _HOST, "scheduler"


class HostToController(Base, frozen=True):
    """A message of a host to the controller."""

    senders, receiver = _HOST, "controller"


class HostToExecutor(Base, frozen=True):
    """A message of a host to the executor of another one."""

    senders, receiver = _HOST, "executor"


class HostToCoordinator(Base, frozen=True):
    """A message of a host to the coordinator of another one."""

    senders, receiver = _HOST, "coordinator"


class HostToStore(Base, frozen=True):
    """A message of a host to the store of another one."""

    senders, receiver = _HOST, "store"


class HostToSession(Base, frozen=True):
    """A message of a host to a client."""

    senders, receiver = _HOST, "session"
