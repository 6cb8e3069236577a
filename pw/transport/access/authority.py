"""Makes the certificates of a cluster: its authority, which issues and revokes those of processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pw.core.errors import Error
from pw.core.messages.roles import Role
from pw.transport.access.certificates import identity_of
from pw.transport.access.identity import (
    CREDENTIAL_DAYS,
    TRUST_DOMAIN,
    date_text,
    island_uri,
    uri_of,
)

AUTHORITY_DAYS = 3652
_SKEW = timedelta(minutes=10)
"""Certificates are valid so long before they are issued: clocks of machines differ."""
_MOST_NAME = 64
"""Characters of a common name (RFC 5280, appendix A.1)."""
_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class Authority:
    """The authority of one cluster: a private key (EC P-256), and the certificate that it has signed itself.

    Args:
        key: its private key.
        certificate: its certificate.
        revoked: entries of its revocation list so far.
    """

    def __init__(
        self,
        key: ec.EllipticCurvePrivateKey,
        certificate: x509.Certificate,
        revoked: Iterable[x509.RevokedCertificate] = (),
    ) -> None:
        self._key = key
        self._certificate = certificate
        self._revoked = {entry.serial_number: entry for entry in revoked}

    @classmethod
    def create(cls, trust_domain: str = TRUST_DOMAIN, days: float = AUTHORITY_DAYS) -> Authority:
        """Make a new authority. Raises Error if `trust_domain` is none."""
        uri_of(Role.CONTROLLER, "any", "", trust_domain)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pw authority")])
        now = datetime.now(UTC)
        public = key.public_key()
        certificate = (
            _builder(name, name, public, now, now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.UniformResourceIdentifier(f"spiffe://{trust_domain}")]
                ),
                critical=False,
            )
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def read(cls, key: bytes, certificate: bytes, revoked: bytes = b"") -> Authority:
        """The authority of a key, a certificate and a revocation list, all PEM.

        Raises:
            Error: they cannot be read.
        """
        try:
            private = serialization.load_pem_private_key(key, None)
            own = x509.load_pem_x509_certificate(certificate)
            entries = list(x509.load_pem_x509_crl(revoked)) if revoked else []
        except (ValueError, TypeError) as error:
            raise Error(f"the authority's key or certificate cannot be read: {error}") from error
        if own.public_key() != private.public_key():
            raise Error("the authority's key does not belong to its certificate")
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise Error("the authority's key is of another kind than those that pw makes")
        return cls(private, own, entries)

    @property
    def key(self) -> bytes:
        """PEM of the private key, not encrypted."""
        return _key_pem(self._key)

    @property
    def certificate(self) -> bytes:
        """PEM of the certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def expires(self) -> datetime:
        """Return the end of the certificate's life."""
        return self._certificate.not_valid_after_utc

    @property
    def trust_domain(self) -> str:
        """The trust domain of the processes of the cluster."""
        names = self._certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        (uri,) = names.value.get_values_for_type(x509.UniformResourceIdentifier)
        return uri.removeprefix("spiffe://")

    def issue(
        self,
        role: Role,
        name: str,
        tenant: str = "",
        days: float = CREDENTIAL_DAYS,
        address: str = "",
        islands: Sequence[str] = (),
    ) -> bytes:
        """Make a key and a certificate for a process.

        Args:
            tenant: of a client; by default its name.
            days: how long they are valid, at most as long as the authority is.
            address: the controller's, for the process.
            islands: the only ones that a worker may join; all if there are none.

        Returns:
            PEM with comment lines: the private key, the certificate, and the authority's certificate.

        Raises:
            Error: the name, tenant, address or an island cannot be in a certificate or its file.
        """
        if role is Role.CLIENT:
            tenant = tenant or name
        uri = uri_of(role, name, tenant, self.trust_domain)
        if islands and role is not Role.WORKER:
            raise Error(f"only workers join islands; leave them out for the {role} {name}")
        uris = [uri, *(island_uri(one, self.trust_domain) for one in dict.fromkeys(islands))]
        if address and (
            not address.startswith("tcp://") or not address.isprintable() or " " in address
        ):
            raise Error(f"{address!r} is no address; it looks like tcp://host:port")
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        last = min(now + timedelta(days=days), self.expires)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_MOST_NAME])])
        public = key.public_key()
        own = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            _builder(subject, self._certificate.subject, public, now, last)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
                ),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False
            )
            .add_extension(
                x509.SubjectAlternativeName(list(map(x509.UniformResourceIdentifier, uris))),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        serial = f"{certificate.serial_number:x}"
        head = [
            f"# Credentials of the {identity_of(certificate)}, until {date_text(last.timestamp())}.",
            "# They have a private key: only the user of this process may read them.",
            f"# {uri}, serial {serial}",
            *([f"pw-address: {address}"] if address else []),
        ]
        text = "".join(f"{line}\n" for line in head).encode()
        return (
            text
            + _key_pem(key)
            + certificate.public_bytes(serialization.Encoding.PEM)
            + self.certificate
        )

    def revoke(self, *serials: str) -> bytes:
        """Revoke certificates by their serial numbers (hexadecimal).

        Returns:
            PEM of the revocation list: these, and all that were revoked before.
        """
        now = datetime.now(UTC)
        for serial in serials:
            number = int(serial, 16)
            revoked = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now)
            self._revoked.setdefault(number, revoked.build())
        own = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now)
            .next_update(max(self.expires, now + timedelta(days=1)))
            .add_extension(x509.CRLNumber(len(self._revoked)), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False
            )
        )
        for entry in self._revoked.values():
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    first: datetime,
    last: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(first, last) - _SKEW)
        .not_valid_after(last)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in allowed for usage in _USAGES})


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
