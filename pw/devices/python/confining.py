"""Confines a Python process of clients before it runs any of their code.

The process stays one of its user: it may do what that user may, but for what is taken from it here
(`docs/security.md`, "Python from clients").
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from collections.abc import Mapping
from typing import NamedTuple

MEMORY_VARIABLE = "PW_PYTHON_MEMORY"
"""Bounds the memory that the process may take, in bytes."""
CONFINE_VARIABLE = "PW_PYTHON_CONFINE"
"""Variable that is set if the functions are of tenants, who get no capabilities and no secrets of the host."""


class ChildBounds(NamedTuple):
    """What the Python processes of a host may do."""

    memory_bytes: int = 0
    """Bytes of memory of each process; 0 for no bound."""
    strangers: bool = False
    """The functions are of other users than the host's."""


NO_BOUNDS = ChildBounds()

_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_OWN = re.compile(r"PW_")
_SECRET = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_KEY", re.IGNORECASE)


def environment(variables: Mapping[str, str], bounds: ChildBounds) -> dict[str, str]:
    """Return the environment of a Python process: the host's without credentials.

    Strangers get no variable that is named like a secret.
    """
    result = {
        name: value
        for name, value in variables.items()
        if not _OWN.match(name) and not (bounds.strangers and _SECRET.search(name))
    }
    if bounds.memory_bytes:
        result[MEMORY_VARIABLE] = str(bounds.memory_bytes)
    if bounds.strangers:
        result[CONFINE_VARIABLE] = "1"
    return result


def confine() -> str:
    """Confine this process as its environment says, before it has threads; return what was not possible.

    It leaves no core files, takes no more memory than it may, and gets no rights from programs that
    it runs. For strangers it also enters a user namespace of its own: it keeps its user, and has no
    capabilities outside.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory_bytes = int(os.environ.pop(MEMORY_VARIABLE, "0"))
    if memory_bytes:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        bound = memory_bytes if hard == resource.RLIM_INFINITY else min(hard, memory_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    strangers = bool(os.environ.pop(CONFINE_VARIABLE, ""))
    if sys.platform != "linux":
        return "this system cannot confine processes" if strangers else ""
    libc = ctypes.CDLL(None, use_errno=True)
    missing = []
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        missing.append(f"no_new_privs: {os.strerror(ctypes.get_errno())}")
    if strangers and (error := _enter_user_namespace(libc)):
        missing.append(f"a user namespace: {error}")
    return "; ".join(missing)


def _enter_user_namespace(libc: ctypes.CDLL) -> str:
    """Enter another user namespace under the same user; return why that is not possible."""
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWUSER):
        return os.strerror(ctypes.get_errno())
    try:
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as mapping:
                mapping.write(text)
    except OSError as error:
        return f"{error.strerror} ({error.filename})"
    return ""
