"""Files of credentials, certificates of peers, and revocation lists."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from pw.core.errors import AccessRefused, Error
from pw.core.messages.roles import Role
from pw.transport.access.authority import Authority
from pw.transport.access.certificates import identify, revoked_serials
from pw.transport.access.credentials import Credentials
from pw.transport.access.identity import Identity
from tests.fuzz.target import Run, Target


@functools.cache
def _authority() -> Authority:
    return Authority.create()


def _issued() -> list[bytes]:
    authority = _authority()
    return [
        authority.issue(Role.WORKER, "w0"),
        authority.issue(Role.CLIENT, "ann", "research"),
        b"pw-address: tcp://10.0.0.1:7777\n" + authority.issue(Role.CONTROLLER, "main"),
    ]


def _certificates() -> list[bytes]:
    return [x509.load_pem_x509_certificates(pem)[0].public_bytes(Encoding.DER) for pem in _issued()]


def _lists() -> list[bytes]:
    authority = Authority.read(_authority().key, _authority().certificate)
    return [authority.revoke("5"), authority.revoke("6", "7")]


@contextmanager
def _file() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "credentials.pem"
        path.touch(0o600)

        def run(data: bytes) -> None:
            path.write_bytes(data)
            read = Credentials.read(path)
            assert isinstance(read.own, Identity)
            assert isinstance(read.address, str)
            read.connect()
            read.accept()

        yield run


@contextmanager
def _list() -> Iterator[Run]:
    signers = [x509.load_pem_x509_certificate(_authority().certificate)]

    def run(data: bytes) -> None:
        revoked_serials(data, signers, "a file")

    yield run


def _identify(data: bytes) -> None:
    str(identify(data)).encode()


TARGETS = [
    Target("credentials", _issued, opened=_file, allowed=(Error,), weight=0.05),
    Target("peer-certificates", _certificates, _identify, allowed=(AccessRefused,), weight=1),
    Target("revocation-lists", _lists, opened=_list, allowed=(Error,), weight=0.3),
]
