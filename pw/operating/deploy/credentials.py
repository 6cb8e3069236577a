"""The credentials of a cluster's daemons and of the user who starts it: issued where they are missing."""

from __future__ import annotations

import getpass
import time
from dataclasses import dataclass, field
from pathlib import Path

from pw.core.errors import Error
from pw.core.messages.roles import Role
from pw.operating.deploy.cluster_file import ClusterFile
from pw.transport.access import private_files
from pw.transport.access.identity import CREDENTIAL_DAYS, TRUST_DOMAIN
from pw.transport.access.keys_folder import KEY, KeysFolder

LEAST_DAYS = 9.0
"""Credentials that are valid for less are issued again."""
OPERATOR = "operator"


@dataclass
class Keys:
    """The authority of a cluster, in the folder that the cluster file names."""

    folder: KeysFolder
    _valid_until: dict[str, float] = field(default_factory=dict, init=False)
    """Expiry of the credentials that were last issued for a name, in seconds since 1970."""

    def __post_init__(self) -> None:
        if not (self.folder.path / KEY).exists():
            self.folder.create(TRUST_DOMAIN)
        revoked = self.folder.revocations()
        for one in self.folder.issued():
            self._valid_until[one.name] = 0.0 if one.serial in revoked else one.until

    @classmethod
    def of(cls, file: ClusterFile) -> Keys | None:
        """Return the keys of a cluster, made if they are missing; None for one without certificates."""
        return None if file.insecure else cls(KeysFolder(file.keys_folder))

    def missing_for(self, name: str, island: str, where: str, *, has_file: bool) -> bytes | None:
        """Return new credentials for a daemon unless the file that it has is valid for long.

        Args:
            name: of the daemon.
            island: of a worker, the only one that it may join; empty for the controller.
            where: the machine and file, for errors.
            has_file: whether there is such a file.

        Raises:
            Error: the file that is there was not issued here.
        """
        if has_file and name not in self._valid_until:
            raise Error(
                f"{where} is of another authority than {self.folder.path}; name that authority's folder with "
                "`keys:` in the cluster file, or remove the file"
            )
        if has_file and self._valid_until[name] > time.time() + LEAST_DAYS * 86400:
            return None
        return self.issue(name, island)

    def issue(self, name: str, island: str, days: float = CREDENTIAL_DAYS) -> bytes:
        """Return new credentials for a daemon."""
        role = Role.WORKER if island else Role.CONTROLLER
        return self.folder.issue(role, name, "", days, "", [island] if island else [])

    def client_file(self, address: str) -> Path:
        """Return the file with this user's own credentials, as an operator of the cluster at `address`."""
        file = self.folder.path / "client.pem"
        name = getpass.getuser()
        line = f"pw-address: {address}".encode()
        if not (
            file.exists()
            and line in private_files.read(file).splitlines()
            and self._valid_until.get(name, 0.0) > time.time() + LEAST_DAYS * 86400
        ):
            issued = self.folder.issue(Role.CLIENT, name, OPERATOR, CREDENTIAL_DAYS, address)
            private_files.write(file, issued)
        return file
