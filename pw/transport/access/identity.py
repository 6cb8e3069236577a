"""The identity of a process as its certificate states it: a SPIFFE ID, a URI of the subject's alternative name.

    spiffe://TRUST-DOMAIN/pw/controller/NAME
    spiffe://TRUST-DOMAIN/pw/worker/NAME
    spiffe://TRUST-DOMAIN/pw/client/TENANT/NAME

The certificate of a worker may have further URIs, which name the only islands that it may join:

    spiffe://TRUST-DOMAIN/pw/island/ISLAND

The form of trust domains and names is that of the SPIFFE-ID specification, section 2.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from pw.core.errors import Error
from pw.core.messages.roles import Role, role_of

TRUST_DOMAIN = "pw"
"""Trust domain of an authority that names no other."""
CREDENTIAL_DAYS = 90.0
"""Days that a new credential is valid."""

_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}")
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,200}")
_URI = re.compile(
    r"(?i:spiffe)://([^/]*)/pw/(?:(controller|worker)/([^/]+)|(client)/([^/]+)/([^/]+))"
)

_ISLAND = re.compile(r"(?i:spiffe)://([^/]*)/pw/island(?:/(.*))?", re.DOTALL)


def date_text(moment: float) -> str:
    """Return a moment, in seconds since 1970, as text for errors and tables."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


class Identity(NamedTuple):
    """Role and name of a process, and the tenant of a client, as a certificate states them."""

    role: Role
    name: str
    tenant: str
    """Tenant of a client; empty for other roles."""
    serial: str
    """Serial number of the certificate, in lower-case hexadecimal digits."""
    expires: float
    """End of the certificate's life, in seconds since 1970."""
    trust_domain: str
    islands: tuple[str, ...] = ()
    """The only islands that a worker may join; empty for all."""

    def may_be(self, node: str) -> bool:
        """Whether the process may be the node with a name.

        A worker has the name of its certificate, or that name and more after a `/`, as in `w0/1`. No name in a
        certificate has a `/`, so no two certificates allow the same name. The names of other roles are free.
        """
        if self.role is not role_of(node):
            return False
        return self.role is not Role.WORKER or node.partition("/")[0] == self.name

    def may_join(self, island: str) -> bool:
        """Whether the worker may join an island."""
        return not self.islands or island in self.islands

    @property
    def uri(self) -> str:
        """The SPIFFE ID."""
        return uri_of(self.role, self.name, self.tenant, self.trust_domain)

    @property
    def user(self) -> str:
        """A client's name after its tenant, as in `research/ann`; only the name if they are equal."""
        return self.name if self.name == self.tenant else f"{self.tenant}/{self.name}"

    @property
    def fields(self) -> dict[str, str]:
        """Return the fields of an audit line."""
        return {"tenant": self.tenant, "name": self.uri, "serial": self.serial}

    def __str__(self) -> str:
        return f"{self.role} {self.name}" + (f" of tenant {self.tenant}" if self.tenant else "")


class Subject(NamedTuple):
    """The role, names and trust domain that a SPIFFE ID states."""

    role: Role
    name: str
    tenant: str
    trust_domain: str


def uri_of(role: Role, name: str, tenant: str, trust_domain: str) -> str:
    """Return the SPIFFE ID of a process.

    Args:
        tenant: of a client; empty for other roles.

    Raises:
        Error: a part cannot be in a SPIFFE ID, or a process that is no client has a tenant.
    """
    if not _DOMAIN.fullmatch(trust_domain):
        raise Error(
            f"{trust_domain!r} is no trust domain: it has lower-case letters, digits, '.', '-' and '_', as in "
            "cluster.example.com"
        )
    for kind, text in (("name", name), *([("tenant", tenant)] if role is Role.CLIENT else [])):
        if not _NAME.fullmatch(text):
            raise Error(
                f"{text!r} is no {kind} of a {role}: it has letters, digits, '.', '-' and '_', at most 200"
            )
    if role is Role.CLIENT:
        return f"spiffe://{trust_domain}/pw/client/{tenant}/{name}"
    if tenant:
        raise Error(f"only clients have a tenant; leave it out for the {role} {name}")
    return f"spiffe://{trust_domain}/pw/{role}/{name}"


def island_uri(island: str, trust_domain: str) -> str:
    """Return the URI that allows an island. Raises Error if the name cannot be in a URI."""
    if not _NAME.fullmatch(island):
        raise Error(
            f"{island!r} is no island that a certificate can name: it has letters, digits, '.', '-' and '_', "
            "at most 200"
        )
    return f"spiffe://{trust_domain}/pw/island/{island}"


def island_of(uri: str, trust_domain: str) -> str | None:
    """Return the island that a URI allows; None if it is a URI of another kind.

    Raises:
        Error: it is of another trust domain, or its island has no possible name.
    """
    match = _ISLAND.fullmatch(uri)
    if match is None:
        return None
    domain, island = match.groups()
    if domain.lower() != trust_domain or not _NAME.fullmatch(island or ""):
        raise Error(f"{uri!r} allows no island of the trust domain {trust_domain}")
    return str(island)


def subject_of(uri: str) -> Subject | None:
    """Return what a URI states; None if it is not the SPIFFE ID of a process of pw."""
    match = _URI.fullmatch(uri)
    if match is None:
        return None
    domain, role, name, client, tenant, client_name = match.groups()
    kind = Role(client or role)
    subject = Subject(kind, client_name or name, tenant or "", domain.lower())
    try:
        uri_of(*subject)
    except Error:
        return None
    return subject
