"""Dials the chunk connections of a plane (see `pw.transport.bulk.chunks`)."""

from __future__ import annotations

import errno
import os
import socket

from pw.core.errors import AccessRefused
from pw.core.messages.roles import Role
from pw.transport.access.security import NO_CREDENTIALS, NOBODY_NEAR, Security
from pw.transport.access.unix import is_trusted
from pw.transport.bulk.chunk_stream import Stream, TlsStream, stage
from pw.transport.bulk.chunks import prepare
from pw.transport.endpoints import look_up, parse
from pw.transport.links import nearby
from pw.transport.log import audit


class ChunkDialler:
    """Makes streams, as the process uses tcp: with TLS, only towards this user's processes, or plain.

    Args:
        security: how the process uses tcp.
    """

    def __init__(self, security: Security) -> None:
        self.security = security
        self._stage = stage()

    def dial(self, endpoint: str) -> Stream:
        """A connection to a host, which may not be made yet.

        Raises:
            ConnectionFailed: it is no endpoint.
            AccessRefused: this process has no credentials, and no process of this user listens there.
            OSError: it cannot be reached.
        """
        where = look_up(parse(endpoint))
        is_tcp = where.family != socket.AF_UNIX
        if is_tcp and self.security.credentials is None:
            near = nearby.dial(where)
            if near is not None:
                return Stream(near, dialled=True)
            if not self.security.insecure:
                raise AccessRefused(NOBODY_NEAR)
        connection = socket.socket(where.family, socket.SOCK_STREAM)
        try:
            prepare(connection)
            code = connection.connect_ex(where.address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            if code == 0 and not is_trusted(connection):
                raise PermissionError("another user listens there")
            return self._stream(connection, dialled=True)
        except BaseException:
            connection.close()
            raise

    def accepted(self, connection: socket.socket) -> Stream:
        """A stream over a connection that a peer has dialled, whose preamble has been read.

        Raises:
            AccessRefused: this process takes no tcp connection.
        """
        if connection.family != socket.AF_UNIX and not self.security.takes_tcp:
            raise AccessRefused(NO_CREDENTIALS)
        return self._stream(connection, dialled=False)

    def is_revoked(self, stream: Stream) -> bool:
        """Whether the certificate of a stream's peer has been revoked since; writes an audit line."""
        credentials, peer = self.security.credentials, stream.identity
        if credentials is None or peer is None or not credentials.is_revoked(peer):
            return False
        audit("revoked", **peer.fields, plane="bulk")
        return True

    def _stream(self, connection: socket.socket, dialled: bool) -> Stream:
        credentials = self.security.credentials
        if connection.family == socket.AF_UNIX or credentials is None:
            return Stream(connection, dialled)
        role = Role.WORKER if dialled else None
        return TlsStream(connection, dialled, credentials, self._stage, role)
