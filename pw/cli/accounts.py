"""The file of `pw-controller --accounts`: one JSON document a line, which nothing changes any more."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from pw.core.accounts import AccountEntry, FolderEntry, Spent
from pw.core.errors import ArgumentError
from pw.core.ids import CONTROLLER
from pw.transport.log import log

_ENTRY = msgspec.json.Decoder(AccountEntry)
_FOLDER = msgspec.json.Decoder(FolderEntry)
_KIND = msgspec.json.Decoder(dict[str, msgspec.Raw])


class AccountsFile:
    """Appends entries to a file (`pw.core.accounts.AccountSink`).

    Args:
        path: the file; it is made if it does not exist, and readable for its owner only.

    Raises:
        ArgumentError: the file cannot be read or written, or has other lines than entries.
    """

    def __init__(self, path: str) -> None:
        self.settle: Callable[[], object] = lambda: None
        self._path = path
        self._sums: dict[str, Spent] = {}
        self._folders: dict[tuple[str, str], FolderEntry] = {}
        """Checkpoints on disk that the file had at first, by tenant and path."""
        self._is_failing = False
        try:
            Path(path).touch(0o600)
            if not Path(path).is_file():
                raise OSError("it is no file")
            self._read()
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - it is open until `close`
        except OSError as error:
            raise ArgumentError(f"--accounts {path} cannot be used: {error}") from None

    def _read(self) -> None:
        """Add up the entries; a last line without an end was being written when its machine stopped."""
        whole_bytes = 0
        with open(self._path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._add(line)
                except msgspec.DecodeError as error:
                    raise ArgumentError(
                        f"--accounts {self._path}, line {number} is no entry of an account: {error}"
                    ) from None
                whole_bytes += len(line)
        if Path(self._path).stat().st_size > whole_bytes:
            with open(self._path, "r+b") as file:
                file.truncate(whole_bytes)

    def _add(self, line: bytes) -> None:
        """Count the entry of a line. Raises msgspec.DecodeError if it has none."""
        if "stored" not in _KIND.decode(line):
            entry = _ENTRY.decode(line)
            self._sums.setdefault(entry.tenant, Spent()).add(entry)
            return
        folder = _FOLDER.decode(line)
        self._folders.pop((folder.tenant, folder.path), None)
        if folder.size_bytes:
            self._folders[folder.tenant, folder.path] = folder

    def sums(self) -> Mapping[str, Spent]:
        """Return the sums of the entries that the file had at first, by tenant."""
        return self._sums

    def folders(self) -> Sequence[FolderEntry]:
        """Return the checkpoints on disk that the file had at first."""
        return list(self._folders.values())

    def write(self, entries: Sequence[AccountEntry]) -> bool:
        """Append entries; return whether all are in the file."""
        return self._append(entries)

    def write_folders(self, entries: Sequence[FolderEntry]) -> bool:
        """Append entries of checkpoints on disk; return whether all are in the file."""
        return self._append(entries)

    def _append(self, entries: Sequence[AccountEntry | FolderEntry]) -> bool:
        now = round(time.time(), 3)
        lines = "".join(
            json.dumps({"time": now} | _rounded(msgspec.to_builtins(entry))) + "\n"
            for entry in entries
        ).encode()
        try:
            before_bytes = self.file.seek(0, 2)
            if self.file.write(lines) != len(lines):
                self.file.truncate(before_bytes)
                raise OSError("there is no room for a whole line")
        except OSError as error:
            if not self._is_failing:
                log("error", "accounts not written", CONTROLLER, file=self._path, reason=str(error))
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def close(self) -> None:
        """Write what was used until now, and close the file. Idempotent."""
        if not self.file.closed:
            self.settle()
            self.file.close()


def _rounded(fields: dict[str, object]) -> dict[str, object]:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in fields.items()}
