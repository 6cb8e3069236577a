"""The credentials of a process: its private key, its certificate, and the authorities that it trusts.

They are one PEM file, which `pw keys issue` makes, or a folder as Kubernetes mounts a secret of
cert-manager:

    tls.crt    the certificate and intermediate certificates
    tls.key    the private key
    ca.crt     the authorities' certificates
    crl.pem    revocation lists; optional

Text before the first PEM block of a file may have a line `pw-address: tcp://host:port`, the
controller's address. Links use TLS 1.3 with certificates of both ends. No host name is checked: an
end checks that an authority of its own has issued the peer's certificate, and which process of
which trust domain it states (`Identity`).
"""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from pw.core.errors import AccessRefused, Error
from pw.core.messages.roles import Role
from pw.transport.access import private_files
from pw.transport.access.identity import Identity, date_text
from pw.transport.access.joined import address_in, joined_address, joined_file
from pw.transport.endpoints import is_on_loopback
from pw.transport.log import log

if TYPE_CHECKING:
    from pw.transport.access.certificates import Bundle

__all__ = ["Credentials", "Identity", "explain", "credentials_for"]

CREDENTIALS, REVOKED = "PW_CREDENTIALS", "PW_REVOKED"
LOOK_S = 1.0
"""Least seconds between two looks of `refresh` at the files."""
_PROGRAMS = {Role.CONTROLLER: "pw-controller", Role.WORKER: "pw-worker", Role.CLIENT: "a client"}


@dataclass(frozen=True)
class _Read:
    """The content of the files when they were read."""

    signature: tuple[object, ...]
    bundle: Bundle
    address: str
    revoked: frozenset[str]
    connect: ssl.SSLContext
    accept: ssl.SSLContext


class Credentials:
    """A process's credentials, read again when their files change.

    New links use the new ones. The threads of a process may share an object: each call uses what one reading
    has found.
    """

    def __init__(
        self,
        path: Path,
        revoked: Path | None,
        clock: Callable[[], float] = time.monotonic,
        look_s: float = LOOK_S,
    ) -> None:
        """Read the files (see `read`)."""
        self._path = path
        self._revoked = revoked
        self._clock = clock
        self._look_s = look_s
        self._looked_s = clock()
        self._warned = ""
        self._last = self._read()
        self._warn_of_expiry()

    @classmethod
    def read(
        cls, path: str | Path, revoked: str | Path | None = None, look_s: float = LOOK_S
    ) -> Credentials:
        """Read credentials.

        Args:
            path: a PEM file, or a folder.
            revoked: a file with revocation lists, beside those of the folder.
            look_s: seconds between two looks at the files.

        Raises:
            Error: a file cannot be read, others could read the private key, or the credentials are incomplete
                or not valid now.
        """
        return cls(Path(path), Path(revoked) if revoked else None, look_s=look_s)

    @property
    def own(self) -> Identity:
        """The identity of this process."""
        return self._last.bundle.identity

    @property
    def address(self) -> str:
        """The controller's address, if the file names one; else empty."""
        return self._last.address

    def connect(self) -> ssl.SSLContext:
        """The context of an end that dials: TLS 1.3, and the listener must have a certificate."""
        return self._last.connect

    def accept(self) -> ssl.SSLContext:
        """The context of an end that listens: TLS 1.3, and the dialler must have a certificate."""
        return self._last.accept

    def for_browsers(self) -> ssl.SSLContext:
        """The context of an end that browsers dial, which have no certificate: they need a token."""
        context = _context(ssl.PROTOCOL_TLS_SERVER, self._last.bundle)
        context.verify_mode = ssl.CERT_NONE
        return context

    def identify(self, der: bytes | None, role: Role | None = None) -> Identity:
        """The identity of a peer.

        Args:
            der: its certificate, from `getpeercert(binary_form=True)`, which has verified the signatures.
            role: the role that it must have; None for any.

        Raises:
            AccessRefused: it has no certificate, or one that states no process of pw, is of another trust
                domain or role, or is revoked.
        """
        from pw.transport.access.certificates import identify

        if not der:
            raise AccessRefused("the peer has shown no certificate")
        peer = identify(der)
        if peer.trust_domain != self.own.trust_domain:
            raise AccessRefused(
                f"the peer is {peer} of the trust domain {peer.trust_domain}, and this process is of "
                f"{self.own.trust_domain}"
            )
        if self.is_revoked(peer):
            raise AccessRefused(f"the certificate of the {peer} is revoked (serial {peer.serial})")
        if role is not None and peer.role is not role:
            raise AccessRefused(f"its certificate is that of {peer}, not of a {role}")
        return peer

    def shown(self, der: bytes | None) -> Identity | None:
        """Return the identity in a peer's certificate, also of a refused peer; None if it states none."""
        from pw.transport.access.certificates import identify

        try:
            return identify(der) if der else None
        except AccessRefused:
            return None

    def is_revoked(self, identity: Identity) -> bool:
        """Whether the certificate of an identity is revoked."""
        return identity.serial in self._last.revoked

    def derived(self, purpose: bytes) -> bytes:
        """Return 32 secret bytes that follow from the private key, the same ones at each start with it."""
        key = self._last.bundle.shown.partition(b"-----BEGIN CERTIFICATE")[0]
        return blake2b(key, digest_size=32, person=b"pw derived", salt=purpose).digest()

    def refresh(self) -> bool:
        """Read the files again if they have changed since; at most once in `look_s`. Returns whether they did.

        Credentials that cannot be used are logged once, and the old ones stay; new revocation lists count even
        then. That a certificate expires soon is logged, too.
        """
        now_s = self._clock()
        if now_s - self._looked_s < self._look_s:
            return False
        self._looked_s = now_s
        if _signature(self._files()) == self._last.signature:
            self._warn_of_expiry()
            return False
        try:
            read = self._read()
            new, own = read.bundle.identity, self.own
            if new.role is not own.role or (own.role is Role.WORKER and new.name != own.name):
                words = f"{self._path} is for the {new} now"
                raise Error(f"{words}, and this process is the {self.own}")
            self._last = read
        except Error as error:
            self._warn("credentials are not replaced", str(error))
            return self._take_lists()
        self._warned = ""
        self._warn_of_expiry()
        return True

    def check_role(self, role: Role) -> None:
        """Raise Error unless the credentials are for a process of this role."""
        if self.own.role is not role:
            raise Error(
                f"{self._path} is for the {self.own}, and {_PROGRAMS[role]} needs the certificate of a "
                f"{role}: `pw keys issue {role} NAME` makes one"
            )

    def _take_lists(self) -> bool:
        """Take new revocation lists, although the rest cannot be used; whether there are any."""
        try:
            revoked = self._read_lists(self._last.bundle)
        except Error:
            return False
        if revoked == self._last.revoked:
            return False
        self._last = replace(self._last, revoked=revoked)
        return True

    @property
    def end_in_words(self) -> str:
        """Return the end of the certificate if a tenth of its life is left, at most a week; else empty."""
        soon = time.time() > self._last.bundle.renew
        return f"{self._path} expires {date_text(self.own.expires)}" if soon else ""

    def _warn_of_expiry(self) -> None:
        if words := self.end_in_words:
            self._warn("credentials expire soon", words)

    def _warn(self, event: str, reason: str) -> None:
        if self._warned != reason:
            self._warned = reason
            log("warning", event, self.own.name, reason=reason)

    def _files(self) -> list[Path]:
        path = self._path
        own = [path / name for name in ("tls.crt", "tls.key", "ca.crt", "crl.pem")]
        return [*(own if path.is_dir() else [path]), *([self._revoked] if self._revoked else [])]

    def _read(self) -> _Read:
        from pw.transport.access import certificates

        path = self._path
        signature = _signature(self._files())
        if path.is_dir():
            public = private_files.read(path / "tls.crt", private=False)
            pem = public + b"\n" + private_files.read(path / "tls.key")
            authority = private_files.read(path / "ca.crt", private=False)
        else:
            pem, authority = private_files.read(path), b""
        bundle = certificates.bundle(pem, authority, str(path))
        revoked = self._read_lists(bundle)
        if bundle.identity.serial in revoked:
            raise Error(f"the certificate in {path} is revoked; issue a new one")
        try:
            dials = _context(ssl.PROTOCOL_TLS_CLIENT, bundle)
            listens = _context(ssl.PROTOCOL_TLS_SERVER, bundle)
        except ssl.SSLError as error:
            raise Error(f"TLS cannot use the credentials in {path}: {error}") from error
        return _Read(signature, bundle, address_in(pem), revoked, dials, listens)

    def _read_lists(self, bundle: Bundle) -> frozenset[str]:
        """The serial numbers of revoked certificates."""
        from pw.transport.access.certificates import revoked_serials

        beside = self._path / "crl.pem"
        files = [
            *([beside] if beside.exists() else []),
            *([self._revoked] if self._revoked else []),
        ]
        return frozenset(
            serial
            for file in files
            for serial in revoked_serials(
                private_files.read(file, private=False), bundle.authorities, str(file)
            )
        )


def credentials_for(
    address: str,
    path: str | Path | None = None,
    revoked: str | Path | None = None,
    role: Role | None = None,
    *,
    may_be_plain: bool = False,
) -> Credentials | None:
    """The credentials of this process for the cluster whose controller is at `address`; None if it has none.

    They are those of `path`, else of PW_CREDENTIALS, else, for a client, those that `pw join` has installed, if
    this may be the cluster that was joined. The last two are for tcp addresses only: unix sockets need none.

    Args:
        address: of the controller; it may have several.
        path: a file or folder.
        revoked: a file with revocation lists; by default that of PW_REVOKED.
        role: of this process; None for any.
        may_be_plain: whether a cluster at another address than the joined one may use plain tcp.

    Raises:
        Error: they cannot be used (see `Credentials.read`), or are for another role.
    """
    named = ""
    if not path and address.startswith("tcp://"):
        path, named = os.environ.get(CREDENTIALS), f"--credentials or {CREDENTIALS}"
        if not path and role in (None, Role.CLIENT) and _may_be_joined(address, may_be_plain):
            path, named = joined_file(), "pw join"
    if not path:
        return None
    try:
        credentials = Credentials.read(path, revoked or os.environ.get(REVOKED))
    except Error as error:
        if not named:
            raise
        raise Error(f"{error} (named by {named})") from error
    if role is not None:
        credentials.check_role(role)
    return credentials


def _may_be_joined(address: str, may_be_plain: bool) -> bool:
    """Whether the controller at a tcp address may be that of the cluster that this user has joined.

    It may have several names and addresses. Without credentials a process reaches only its own machine; there
    each port is a controller of its own.
    """
    joined = joined_address()
    if address == joined or not joined or may_be_plain:
        return address == joined
    if not is_on_loopback(address):
        return True
    return is_on_loopback(joined) and address.rpartition(":")[2] == joined.rpartition(":")[2]


# --- what a failed connection means ------------------------------------------------------------------

VERIFY = {
    7: "the peer's certificate is of another cluster: its authority is unknown here",
    9: "the peer's certificate is not valid yet; are the clocks of both machines right?",
    10: "the peer's certificate has expired; issue a new one for it",
    23: "the peer's certificate is revoked",
    26: "the peer's certificate is not for both ends of a connection (clientAuth and serverAuth)",
}
"""Words for X509_V_ERR_* codes; all others are about the authority."""
ALERTS = {
    "ALERT_UNKNOWN_CA": "the peer refused this process's certificate: it is of another cluster",
    "ALERT_CERTIFICATE_EXPIRED": "the peer refused this process's certificate: it has expired",
    "ALERT_CERTIFICATE_REVOKED": "the peer refused this process's certificate: it is revoked",
    "ALERT_CERTIFICATE_REQUIRED": "the peer wants a certificate, and this process has shown none",
    "ALERT_BAD_CERTIFICATE": "the peer refused this process's certificate",
    "ALERT_UNSUPPORTED_CERTIFICATE": "the peer refused this process's certificate: it is not for both ends of "
    "a connection (clientAuth and serverAuth)",
    "ALERT_CERTIFICATE_UNKNOWN": "the peer refused this process's certificate",
    "ALERT_DECRYPT_ERROR": "the peer refused this process's certificate: it is of another cluster",
    "ALERT_ACCESS_DENIED": "the peer has no credentials, so it takes no tcp connection",
    "ALERT_PROTOCOL_VERSION": "the peer does not speak TLS 1.3",
    "ALERT_HANDSHAKE_FAILURE": "the peer does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "the peer does not speak TLS 1.3",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer has shown no certificate: it has no --credentials",
}
_OTHER_PROTOCOL = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG"}
)
NOT_TLS = (
    "the peer does not speak TLS: it has no --credentials, or it is no process of a pw cluster"
)


def explain(error: ssl.SSLError | OSError) -> str:
    """Say in one sentence why TLS with a peer failed, as either end sees it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return VERIFY.get(error.verify_code, VERIFY[7])
    if isinstance(error, ssl.SSLEOFError) or not isinstance(error, ssl.SSLError):
        return "the peer closed the connection before it had shown its certificate"
    reason = str(error.reason or "")
    for part, words in ALERTS.items():
        if part in reason:
            return words
    if reason in _OTHER_PROTOCOL:
        return NOT_TLS
    return f"TLS with the peer failed ({reason.replace('_', ' ').lower() or error})"


# --- files and contexts ------------------------------------------------------------------------------


def _signature(files: list[Path]) -> tuple[object, ...]:
    """Return a fingerprint of the credential files."""
    signature: list[object] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            signature.append(None)
        else:
            signature.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(signature)


def _context(protocol: int, bundle: Bundle) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # The authority may be an intermediate one of a larger PKI.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection shows its certificate
    with _as_file(bundle.shown) as name:
        context.load_cert_chain(name)
    context.load_verify_locations(cadata=bundle.trusted.decode("ascii"))
    return context


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A file with this content, for an interface that takes only names; in memory where the system can."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pw-credentials", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{descriptor}"
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            yield file.name
