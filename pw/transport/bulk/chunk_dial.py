"""Dials the chunk connections of a plane (see `pw.transport.bulk.chunks`)."""

from __future__ import annotations

import errno
import os
import socket

from pw.core.errors import AccessRefused
from pw.core.messages.roles import Role
from pw.transport.access.security import NOBODY_NEAR, Security
from pw.transport.access.unix import is_trusted
from pw.transport.bulk.chunks import prepare
from pw.transport.endpoints import look_up, parse
from pw.transport.links import nearby
from pw.transport.log import audit
from pw.transport.streams.stream import Stream
from pw.transport.streams.tls_stream import TlsStream, stage


class ChunkDialler:
    """Makes streams, as the process uses tcp: with TLS, only towards this user's processes, or plain.

    Args:
        security: how the process uses tcp.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
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
        credentials = self._security.credentials if is_tcp else None
        if is_tcp and credentials is None:
            near = nearby.dial(where)
            if near is not None:
                return self.adopt(Stream(near))
            if not self._security.insecure:
                raise AccessRefused(NOBODY_NEAR)
        connection = socket.socket(where.family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            code = connection.connect_ex(where.address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            if code == 0 and not is_trusted(connection):
                raise PermissionError("another user listens there")
            if credentials is None:
                return self.adopt(Stream(connection))
            return self.adopt(TlsStream(connection, credentials, dialled=True, role=Role.WORKER))
        except BaseException:
            connection.close()
            raise

    def adopt(self, stream: Stream) -> Stream:
        """Prepare a stream for chunks."""
        prepare(stream.socket)
        stream.stage = self._stage
        return stream

    def is_revoked(self, stream: Stream) -> bool:
        """Whether the certificate of a stream's peer has been revoked since; writes an audit line."""
        credentials, peer = self._security.credentials, stream.identity
        if credentials is None or peer is None or not credentials.is_revoked(peer):
            return False
        audit("revoked", **peer.fields, plane="bulk")
        return True
