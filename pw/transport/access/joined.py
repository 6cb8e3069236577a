"""The cluster that this user has joined (`pw join`): its address, and where the credentials for it are."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ADDRESS = re.compile(rb"^[#\s]*pw-address:[ \t]*(\S+)[ \t]*\r?$", re.MULTILINE)
_HEAD_BYTES = 1 << 16


def config_folder() -> Path:
    """The folder of this user's settings of pw."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "pw"


def joined_file() -> Path:
    """Return the file in which `pw join` installs this user's credentials."""
    return config_folder() / "credentials.pem"


def joined_address() -> str:
    """The address of the cluster that this user has joined; empty if none."""
    try:
        return address_of(joined_file())
    except RuntimeError:  # a user without a home
        return ""


def default_address() -> str:
    """The address of the cluster that this process means if it names none; empty for none.

    It is that of PW_ADDRESS, else that of the cluster that this user has joined. PW_ADDRESS may be empty: then
    it is none.
    """
    address = os.environ.get("PW_ADDRESS")
    return joined_address() if address is None else address


def address_of(path: str | os.PathLike[str]) -> str:
    """The address in a credentials file; empty if it names none, or cannot be read."""
    try:
        with open(path, "rb") as file:
            return address_in(file.read(_HEAD_BYTES))
    except OSError:
        return ""


def address_in(pem: bytes) -> str:
    """The address in the line `pw-address:` before the first PEM block; empty if there is none."""
    address = _ADDRESS.search(pem.partition(b"-----BEGIN")[0])
    return address[1].decode(errors="replace") if address else ""
