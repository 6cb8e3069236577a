"""Where a process finds the secret of its cluster (see `pw.transport.proof`).

The secret of a cluster on one machine is a file beside its sockets, so a process needs only the
address. On several machines, each process is given the secret: in a file that only this user can
read, or in the environment; never on a command line, which all users can read.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from pw.core.errors import Error
from pw.transport.private import beside

FILE = "secret"
FILE_VARIABLE, VARIABLE = "PW_SECRET_FILE", "PW_SECRET"
LEAST_BYTES = 16
_MOST_BYTES = 4096


def of_cluster(endpoint: str, file: str | Path | None = None) -> bytes | None:
    """The secret of the cluster whose controller is at `endpoint`; None if no secret is found.

    Args:
        endpoint: the controller's address. A file beside a unix socket precedes the environment.
        file: the file with the secret, if the user names one.

    Raises:
        Error: a secret cannot be read, is too short, or others could read it.
        ConnectionFailed: the endpoint makes no sense.
    """
    if file:
        return read(Path(file))
    folder = beside(endpoint)
    if folder is not None and (folder / FILE).exists():
        return read(folder / FILE)
    if named := os.environ.get(FILE_VARIABLE):
        return read(Path(named))
    if given := os.environ.get(VARIABLE):
        return _checked(given.encode(), f"the environment variable {VARIABLE}")
    return None


def create(folder: Path) -> bytes:
    """Make the secret of a new cluster, and write it beside the cluster's sockets."""
    secret = secrets.token_hex(32).encode()
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret + b"\n")
    return secret


def read(file: Path) -> bytes:
    """The secret in a file. Raises Error if it cannot be read, is too short, or others could read
    it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            found = os.fstat(descriptor)
            content = opened.read(_MOST_BYTES)
    except OSError as error:
        raise Error(f"the cluster's secret cannot be read from {file}: {error.strerror}") from error
    if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o077:
        raise Error(
            f"other users can read the cluster's secret in {file}: give the file to this user, and "
            f"chmod 600 {file}"
        )
    return _checked(content, str(file))


def _checked(content: bytes, where: str) -> bytes:
    secret = content.strip()
    if len(secret) < LEAST_BYTES:
        raise Error(
            f"the cluster's secret in {where} is shorter than {LEAST_BYTES} characters; "
            "`openssl rand -hex 32` makes one"
        )
    return secret
