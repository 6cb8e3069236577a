"""Decides which peers get a link to a node, and remembers the tenant of each.

A hello is refused if the certificate does not allow its node's name: it is of another role, or of a
worker with another name. It is refused, too, if the name's link is live and belongs to another
identity. So no incarnation number, however large, takes a name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from pw.core.errors import AccessRefused, ErrorReport
from pw.core.messages import Hello
from pw.core.messages.roles import role_of
from pw.core.tenants import OPERATOR
from pw.transport.access.identity import Identity
from pw.transport.links.interface import Connection
from pw.transport.links.link import Link
from pw.transport.log import audit

FUTURE_S = 3600.0
"""Most seconds by which the clock of a newer start on this machine can be ahead."""
_AUDIT_AGAIN_S = 60.0
_REMEMBERED = 4096


class Certificates(Protocol):
    """The credentials of a process (`pw.transport.access.credentials.Credentials`)."""

    @property
    def own(self) -> Identity:
        """The identity of this process."""

    def refresh(self) -> bool:
        """Read the files again if they have changed; whether they have."""

    def is_revoked(self, identity: Identity) -> bool:
        """Whether the certificate of an identity is revoked."""


class Access:
    """The access of peers to one node.

    Args:
        node: the name of the node.
        credentials: of this process, if it has any.
    """

    def __init__(self, node: str, credentials: Certificates | None) -> None:
        self._credentials = credentials
        self._node = node
        self._tenants: dict[str, str] = {}
        self._islands: dict[str, tuple[str, ...]] = {}
        self._audited_s: dict[tuple[str, str], float] = {}

    def refused(self, peer: str, identity: Identity | None, reason: str, node: str = "") -> None:
        """Write an audit line, at most one a minute for each address and reason."""
        key, now_s = (peer.rpartition(":")[0], reason), time.monotonic()
        if now_s - self._audited_s.get(key, -_AUDIT_AGAIN_S) < _AUDIT_AGAIN_S:
            return
        if len(self._audited_s) >= _REMEMBERED:
            self._audited_s.clear()
        self._audited_s[key] = now_s
        fields = {} if identity is None else identity.fields
        audit("refused", **fields, node=node or self._node, peer=peer, reason=reason)

    # --- links ---------------------------------------------------------------------------------

    def objection(
        self, hello: Hello, connection: Connection, link: Link | None
    ) -> ErrorReport | None:
        """Return the reason why the sender of a hello may not have its name; None if it may."""
        identity, name = connection.identity, hello.node
        words = ""
        if identity is not None and identity.role is not role_of(name):
            words = f"{name} is the name of a {role_of(name)}, but its certificate is that of {identity}"
        elif identity is not None and not identity.may_be(name):
            words = not_the_name(name, identity)
        elif connection.is_local and hello.incarnation > (time.time() + FUTURE_S) * 1e9:
            words = f"{name} says that it starts in the future; set the clock of this machine right"
        elif link is not None and not _is_same(link, identity):
            words = f"the name {name} belongs to a process with another identity"
        if not words:
            return None
        self.refused(connection.peer, identity, words, name)
        return ErrorReport.of(AccessRefused(words), where=self._node)

    def opened(self, link: Link, connection: Connection) -> None:
        """Remember the identity of a peer whose link is open."""
        identity = link.identity = connection.identity
        self._tenants.pop(link.node, None)
        self._islands.pop(link.node, None)
        if len(self._tenants) >= _REMEMBERED:
            oldest = next(iter(self._tenants))
            del self._tenants[oldest]
            self._islands.pop(oldest, None)
        self._tenants[link.node] = OPERATOR if identity is None else identity.tenant
        if identity is not None and identity.islands:
            self._islands[link.node] = identity.islands
        if self._credentials is not None:
            link.shown_serial = self._credentials.own.serial
        if identity is not None:
            audit("login", **identity.fields, node=link.node, peer=connection.peer)

    def has_another_certificate(self, link: Link) -> bool:
        """Whether this process has another certificate than the one that it has shown on a link."""
        credentials = self._credentials
        if credentials is None or not link.shown_serial:
            return False
        credentials.refresh()
        return credentials.own.serial != link.shown_serial

    def tenant_of(self, node: str) -> str:
        """The tenant of a peer that has or had a link; the operator for plain links, else empty."""
        return OPERATOR if node == self._node else self._tenants.get(node, "")

    def islands_of(self, node: str) -> tuple[str, ...]:
        """The only islands that a peer which has or had a link may join; empty for all."""
        return self._islands.get(node, ())

    def revoked(self, links: Iterable[Link]) -> list[tuple[Link, ErrorReport]]:
        """Read changed credentials; the links whose certificates are revoked since, and what to say."""
        credentials = self._credentials
        if credentials is None or not credentials.refresh():
            return []
        refusals = []
        for link in links:
            identity = link.identity
            if identity is not None and credentials.is_revoked(identity):
                audit("revoked", **identity.fields, node=link.node, peer=link.out.peer)
                words = f"the certificate of {identity} is revoked (serial {identity.serial})"
                words += "; it needs a new one"
                refusals.append((link, ErrorReport.of(AccessRefused(words), where=self._node)))
        return refusals


def not_the_name(name: str, identity: Identity) -> str:
    """Return the reason why a worker may not have a name."""
    return (
        f"{name} is not the name of its certificate, which is that of {identity}: it may be called "
        f"{identity.name}, or {identity.name}/ and more; start it with such a --name, or issue a certificate "
        f"for {name.partition('/')[0]}"
    )


def _is_same(link: Link, identity: Identity | None) -> bool:
    """Whether a link's peer, as far as it is known, has this identity; certificates may differ."""
    if link.incarnation is not None:
        own = link.identity
    elif link.out.is_open:
        own = link.out.identity
    else:
        return True
    if own is None or identity is None:
        return own is identity
    return own.uri == identity.uri
