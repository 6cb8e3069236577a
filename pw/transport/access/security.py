"""How a process uses tcp: with TLS, only towards its own user's processes on this machine, or plain."""

from __future__ import annotations

import os
from typing import NamedTuple

from pw.core.errors import Error
from pw.core.messages.roles import Role
from pw.transport.access import joined
from pw.transport.access.credentials import CREDENTIALS, Credentials, credentials_for
from pw.transport.log import audit, log

INSECURE = "PW_INSECURE"
MEANING = (
    "tcp links are neither encrypted nor authenticated: every process that reaches a port of this cluster can "
    "do all that its users can"
)
NEEDS_CREDENTIALS = (
    "without credentials this process reaches only processes of its own user on this machine; give it "
    "--credentials (PW_CREDENTIALS), or --insecure (PW_INSECURE=1) on a network that you trust"
)
NOBODY_NEAR = f"no process of this user listens there without credentials, and {NEEDS_CREDENTIALS}"
NO_CREDENTIALS = "this process has no credentials, so no process may connect over tcp"
NO_TLS = "it does not use TLS, and this process has credentials; all processes of a cluster need them, or none"


def address_in(credentials: str | os.PathLike[str] | None = None) -> str | None:
    """The controller's address in a credentials file; None if it names none, or cannot be read.

    Args:
        credentials: by default that of PW_CREDENTIALS, unless PW_ADDRESS is set.
    """
    path = credentials or ("" if "PW_ADDRESS" in os.environ else os.environ.get(CREDENTIALS))
    if not path or not os.path.isfile(path):
        return None
    return joined.address_of(path) or None  # `Security.of` says if it cannot be read


def use_tcp(credentials: str = "", *, insecure: bool = False) -> None:
    """Have this process, and those that it starts, use these credentials, or plain tcp.

    Raises:
        Error: both are given.
    """
    _check_one(credentials, insecure)
    if credentials:
        os.environ[CREDENTIALS] = os.path.abspath(credentials)
        os.environ.pop(INSECURE, None)
    elif insecure:
        os.environ[INSECURE] = "1"
        os.environ.pop(CREDENTIALS, None)


def _check_one(credentials: object, insecure: bool) -> None:
    if insecure and credentials:
        raise Error(
            "--credentials and --insecure exclude each other: with credentials, tcp links are encrypted"
        )


class Security(NamedTuple):
    """The credentials of a process, or that it uses plain tcp."""

    credentials: Credentials | None = None
    insecure: bool = False

    @property
    def takes_tcp(self) -> bool:
        """Whether this process uses tcp at all."""
        return self.credentials is not None or self.insecure

    @classmethod
    def of(
        cls,
        address: str,
        credentials: str | os.PathLike[str] | None = None,
        *,
        insecure: bool = False,
        revoked: str | None = None,
        role: Role | None = None,
        warns: bool = True,
    ) -> Security:
        """Find out what a process of the cluster at `address` uses.

        Args:
            address: the controller's. Unix sockets need no credentials.
            credentials: a file or folder; by default that of PW_CREDENTIALS.
            insecure: plain tcp, if there are no credentials; also if PW_INSECURE is 1.
            revoked: a file with revocation lists; by default that of PW_REVOKED.
            role: of this process; None for any.
            warns: log a warning if tcp is plain.

        Raises:
            Error: the credentials cannot be used, or both they and `insecure` are given.
        """
        _check_one(credentials, insecure)
        own = None
        may_be_plain = os.environ.get(INSECURE, "0") not in ("", "0")
        if not insecure:
            path = None if credentials is None else os.fspath(credentials)
            own = credentials_for(
                address, path or None, revoked or None, role, may_be_plain=may_be_plain
            )
        plain = insecure or (own is None and may_be_plain)
        if not plain or not address.startswith("tcp://"):
            return cls(own, insecure=False)
        if warns:
            log("warning", "insecure", role or "pw", address=address, meaning=MEANING)
            audit("insecure", address=address, reason="--insecure" if insecure else INSECURE)
        return cls(None, insecure=True)


CLOSED = Security()
"""Neither TLS nor plain tcp: only unix sockets."""
