"""The folder in which `pw keys` has the authority of a cluster, and the record of what it has issued.

authority.key    its private key, for this user only
authority.pem    its certificate, which all processes have
issued.jsonl     one line for each certificate that was issued
revoked.pem      the revocation list, from the first revocation on
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from cryptography import x509

from pw.core.errors import Error
from pw.core.messages.roles import Role
from pw.transport.access import private_files
from pw.transport.access.authority import Authority
from pw.transport.access.certificates import identities_in
from pw.transport.access.identity import Identity

KEY, CERTIFICATE, ISSUED, REVOKED = "authority.key", "authority.pem", "issued.jsonl", "revoked.pem"


class Issued(msgspec.Struct, frozen=True):
    """One certificate that was issued."""

    serial: str
    name: str
    role: Role
    tenant: str
    until: float
    """Seconds since 1970."""
    islands: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(Identity(self.role, self.name, self.tenant, self.serial, self.until, ""))


_decode = msgspec.json.Decoder(Issued).decode


class KeysFolder:
    """The authority of a cluster in a folder that only this user can enter."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def revoked_file(self) -> Path:
        """The revocation list, which may be empty."""
        return self.path / REVOKED

    def create(self, trust_domain: str) -> Authority:
        """Make a new authority. Raises Error if the folder has one, or others can enter it."""
        authority = Authority.create(trust_domain)
        private_files.make_folder(self.path)
        with self._locked():
            for name in (KEY, CERTIFICATE):
                if (self.path / name).exists():
                    raise Error(
                        f"{self.path} has the authority of a cluster already; `pw keys issue` uses it, and "
                        "--keys names another folder for another cluster"
                    )
            private_files.write(self.path / CERTIFICATE, authority.certificate, 0o644)
            private_files.write(self.revoked_file, authority.revoke(), 0o644)
            private_files.write(self.path / KEY, authority.key)
        return authority

    def authority(self) -> Authority:
        """The authority. Raises Error if there is none, or others could read its key."""
        if not (self.path / KEY).exists():
            raise Error(f"there is no authority in {self.path}; make one with `pw keys init`")
        lists = self.revoked_file
        return Authority.read(
            private_files.read(self.path / KEY),
            private_files.read(self.path / CERTIFICATE, private=False),
            private_files.read(lists, private=False) if lists.exists() else b"",
        )

    def issue(
        self,
        role: Role,
        name: str,
        tenant: str,
        days: float,
        address: str,
        islands: Sequence[str] = (),
    ) -> bytes:
        """Make credentials (see `Authority.issue`), and record them."""
        pem = self.authority().issue(role, name, tenant, days, address, islands)
        identity = identities_in(pem, "the new file")[0]
        until = identity.expires
        record = Issued(identity.serial, name, role, identity.tenant, until, identity.islands)
        with self._locked():
            records = (
                private_files.read(self.path / ISSUED) if (self.path / ISSUED).exists() else b""
            )
            private_files.write(self.path / ISSUED, records + msgspec.json.encode(record) + b"\n")
        return pem

    def issued(self) -> list[Issued]:
        """Return the issued certificates, in this order. Raises Error if the record cannot be read."""
        file = self.path / ISSUED
        if not file.exists():
            return []
        try:
            lines = private_files.read(file).splitlines()
            return [_decode(line) for line in lines if line]
        except (msgspec.MsgspecError, ValueError) as error:
            raise Error(f"{file} cannot be read: {error}") from error

    def revocations(self) -> dict[str, float]:
        """Return the time of each revocation, in seconds since 1970, by the certificate's serial number."""
        if not self.revoked_file.exists():
            return {}
        read = x509.load_pem_x509_crl(private_files.read(self.revoked_file, private=False))
        return {f"{one.serial_number:x}": one.revocation_date_utc.timestamp() for one in read}

    def revoke(self, which: str) -> list[Issued]:
        """Revoke a certificate by its serial number, or all of a process by its name, and write the list.

        Returns:
            What was revoked now.

        Raises:
            Error: there is no such certificate, or the name is that of several processes.
        """
        with self._locked():
            authority, done = self.authority(), self.revocations()
            matches = self._matching(which)
            left = [one for one in matches if one.serial not in done]
            if not left:
                raise Error(f"{which} is revoked already; `pw keys show` lists what was issued")
            lists = authority.revoke(*(one.serial for one in left))
            private_files.write(self.revoked_file, lists, 0o644)
        return left

    def _matching(self, which: str) -> list[Issued]:
        issued = self.issued()
        serial = which.lower().removeprefix("0x").replace(":", "").lstrip("0")
        by_serial = [one for one in issued if one.serial == serial]
        if by_serial:
            return by_serial
        by_name = [one for one in issued if one.name == which]
        current = [one for one in by_name if one.until > time.time()]
        if not by_name:
            raise Error(
                f"no certificate of {which!r} was issued here; `pw keys show` lists names and serial numbers"
            )
        if not current:
            raise Error(f"the certificates of {which} have expired: there is nothing to revoke")
        processes = sorted({str(one) for one in current})
        if len(processes) > 1:
            raise Error(
                f"{which!r} is the name of several processes ({', '.join(processes)}); give the serial number, "
                "as `pw keys show` lists it"
            )
        return current

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other commands out while files change."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise Error(f"there is no authority in {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
