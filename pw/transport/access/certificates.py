"""Reads and checks certificates, keys and revocation lists in PEM and DER (X.509, RFC 5280).

The only module, beside `pw.transport.access.authority`, that imports `cryptography`. Processes without
credentials do not load it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from pw.core.errors import AccessRefused, Error
from pw.transport.access.identity import Identity, date_text, island_of, subject_of

_BLOCK = re.compile(
    rb"-----BEGIN ([A-Z0-9 ]+)-----\r?\n.*?-----END \1-----[ \t]*(?:\r?\n|\Z)", re.DOTALL
)
_CERTIFICATE, _LIST = b"CERTIFICATE", b"X509 CRL"
_BOTH_ENDS = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
WEEK_S = 7 * 86400.0
_SIGNERS = (
    ec.EllipticCurvePublicKey,
    rsa.RSAPublicKey,
    ed25519.Ed25519PublicKey,
    ed448.Ed448PublicKey,
)
_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""Errors that `cryptography` raises for damaged or unknown certificates and lists."""
NO_IDENTITY = (
    "names no process of pw: it needs one URI such as spiffe://DOMAIN/pw/worker/NAME or "
    "spiffe://DOMAIN/pw/client/TENANT/NAME among its subject's alternative names"
)


@dataclass(frozen=True)
class Bundle:
    """Checked credentials: what a process shows, and which authorities it trusts."""

    identity: Identity
    renew: float
    """Time of renewal, in seconds since 1970: a tenth of its life before its end, at most a week."""
    shown: bytes
    """PEM: the private key, its certificate, and the intermediate certificates."""
    trusted: bytes
    """PEM: the authorities' certificates."""
    authorities: tuple[x509.Certificate, ...]
    """Certificates of the authorities, and the intermediate ones."""


def blocks(pem: bytes) -> list[tuple[bytes, bytes]]:
    """The kinds and texts of the PEM blocks in a text."""
    return [(block[1], block[0]) for block in _BLOCK.finditer(pem)]


def bundle(pem: bytes, authority_pem: bytes, where: str) -> Bundle:
    """Check a process's own credentials.

    Args:
        pem: its private key, its certificate and intermediate certificates, in any order.
        authority_pem: more certificates; those that have signed themselves are trusted, or all if none has.
        where: the file, for errors.

    Raises:
        Error: something is missing, does not belong together, or is not valid now.
    """
    key_pem, key = _key(pem, where)
    certificates = _certificates(pem, where)
    authorities = _certificates(authority_pem, where)
    own = next((one for one in certificates if one.public_key() == key), None)
    if own is None:
        if certificates:
            raise Error(
                f"the private key in {where} does not belong to any certificate there; issue both together"
            )
        raise Error(f"there is no certificate in {where}")
    roots = [one for one in (*certificates, *authorities) if _issued(one, one)] or [
        one for one in authorities if one != own
    ]
    if not roots:
        raise Error(
            f"there is no authority's certificate in {where}: add the certificate that has signed "
            "those of the cluster"
        )
    between = [one for one in (*certificates, *authorities) if one != own and one not in roots]
    _check_time(own, "the certificate", where)
    _check_path(own, between, roots, where)
    _check_use(own, where)
    try:
        identity = identity_of(own)
    except AccessRefused as error:
        raise Error(f"the certificate in {where} {error}") from error
    valid_s = identity.expires - own.not_valid_before_utc.timestamp()
    return Bundle(
        identity,
        identity.expires - min(WEEK_S, valid_s / 10),
        key_pem + b"".join(map(_pem, (own, *between))),
        b"".join(map(_pem, roots)),
        (*roots, *between),
    )


def identity_of(certificate: x509.Certificate) -> Identity:
    """The identity that a certificate states. Raises AccessRefused, without a subject, if it states none."""
    uris: list[str]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    subjects = [subject for subject in map(subject_of, uris) if subject is not None]
    if len(subjects) != 1:
        raise AccessRefused(NO_IDENTITY)
    role, name, tenant, domain = subjects[0]
    expires = certificate.not_valid_after_utc.timestamp()
    try:
        islands = tuple(one for uri in uris if (one := island_of(uri, domain)) is not None)
    except Error as error:  # a bound that cannot be read does not count as none
        raise AccessRefused(f"cannot be used: {error}") from error
    serial = f"{certificate.serial_number:x}"
    return Identity(role, name, tenant, serial, expires, domain, islands)


def identities_in(pem: bytes, where: str) -> list[Identity]:
    """The identities in the certificates of a text; valid or not. Raises Error if there is none."""
    identities = []
    for certificate in _certificates(pem, where):
        with contextlib.suppress(AccessRefused):
            identities.append(identity_of(certificate))
    if not identities:
        raise Error(f"no certificate in {where} names a process of pw")
    return identities


def identify(der: bytes) -> Identity:
    """The identity that a peer's certificate states. Raises AccessRefused if it states none."""
    try:
        certificate = _parsed(x509.load_der_x509_certificate(der))
    except _UNREADABLE as error:
        raise AccessRefused("the peer's certificate cannot be read") from error
    try:
        return identity_of(certificate)
    except AccessRefused as error:
        raise AccessRefused(f"the peer's certificate {error}") from None


def revoked_serials(
    pem: bytes, authorities: Sequence[x509.Certificate], where: str
) -> frozenset[str]:
    """The serial numbers in revocation lists, as `Identity.serial` has them.

    A list that is past its date counts still: what was revoked stays so.

    Raises:
        Error: a text has no list, or one that no authority of the cluster has signed.
    """
    serials: set[str] = set()
    lists = [text for kind, text in blocks(pem) if kind == _LIST]
    if not lists:
        raise Error(f"there is no revocation list in {where}")
    for text in lists:
        try:
            read = x509.load_pem_x509_crl(text)
            _ = read.issuer
        except _UNREADABLE as error:
            raise Error(f"a revocation list in {where} cannot be read: {error}") from error
        if not any(_has_signed(one, read) for one in authorities):
            raise Error(
                f"a revocation list in {where} is not signed by the cluster's authority; "
                "take the one that `pw keys revoke` has written"
            )
        serials.update(f"{entry.serial_number:x}" for entry in read)
    return frozenset(serials)


def _key(pem: bytes, where: str) -> tuple[bytes, PublicKeyTypes]:
    """The private key of a text, and the public key that belongs to it."""
    for kind, text in blocks(pem):
        if kind.endswith(b"PRIVATE KEY"):
            try:
                return text, serialization.load_pem_private_key(text, None).public_key()
            except TypeError as error:
                raise Error(
                    f"the private key in {where} is encrypted; decrypt it with `openssl pkey`, as pw has no "
                    "passphrase for it"
                ) from error
            except (ValueError, UnsupportedAlgorithm) as error:
                raise Error(f"the private key in {where} cannot be read") from error
    raise Error(f"there is no private key in {where}")


def _certificates(pem: bytes, where: str) -> list[x509.Certificate]:
    try:
        return [
            _parsed(x509.load_pem_x509_certificate(text))
            for kind, text in blocks(pem)
            if kind == _CERTIFICATE
        ]
    except _UNREADABLE as error:
        raise Error(f"a certificate in {where} cannot be read: {error}") from error


def _parsed(certificate: x509.Certificate) -> x509.Certificate:
    """The certificate, read to its end: `cryptography` reads parts only when they are asked for.

    Raises one of `_UNREADABLE` if a part is damaged.
    """
    certificate.public_key()
    _ = certificate.extensions, certificate.subject, certificate.issuer, certificate.serial_number
    _ = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return certificate


def _check_time(certificate: x509.Certificate, which: str, where: str) -> None:
    now = time.time()
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last.timestamp():
        raise Error(
            f"{which} in {where} has expired, on {date_text(last.timestamp())}; issue a new one"
        )
    if now < first.timestamp():
        raise Error(
            f"{which} in {where} is not valid before {date_text(first.timestamp())}; is this machine's "
            "clock right?"
        )


def _check_path(
    own: x509.Certificate,
    between: Iterable[x509.Certificate],
    roots: Sequence[x509.Certificate],
    where: str,
) -> None:
    """Raise Error unless signatures lead from a certificate to an authority's."""
    last, left = own, list(between)
    while not any(_issued(root, last) for root in roots):
        issuer = next((one for one in left if _issued(one, last)), None)
        if issuer is None:
            raise Error(
                f"the certificate in {where} is not issued by the authority whose certificate is there"
            )
        left.remove(issuer)
        _check_time(issuer, "an intermediate certificate", where)
        last = issuer
    issuers = [root for root in roots if _issued(root, last)]
    _check_time(
        max(issuers, key=lambda root: root.not_valid_after_utc),
        "the authority's certificate",
        where,
    )


def _check_use(own: x509.Certificate, where: str) -> None:
    try:
        allowed = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if any(use not in allowed for use in _BOTH_ENDS):
        raise Error(
            f"the certificate in {where} is not for both ends of a connection: issue it for the extended key "
            "usages clientAuth and serverAuth"
        )


def _issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _has_signed(issuer: x509.Certificate, read: x509.CertificateRevocationList) -> bool:
    key = issuer.public_key()
    if issuer.subject != read.issuer or not isinstance(key, _SIGNERS):
        return False
    try:
        return read.is_signature_valid(key)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return False


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
