"""Checks the installed versions of jax, and that no other project overwrites pw.

The distribution is called `openpathways`, the package that it installs `pw`. Another project on the
Python package index is called `pw` and installs a package of that name into the same folder.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import warnings
from importlib import metadata
from importlib.util import find_spec

from pw.core.errors import Error, VersionMismatch

DISTRIBUTION = "openpathways"
NAMESAKE = "pw"
_PIN = re.compile(r"(jax|jaxlib)\s*==\s*([\w.]+)$")


def version(distribution: str) -> str:
    """The installed version of a distribution; "unknown" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def pins() -> dict[str, str]:
    """The pinned versions of jax and jaxlib; empty for a checkout that was never installed."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (_PIN.match(requirement) for requirement in required)
    return {match[1]: match[2] for match in found if match}


@functools.cache
def check() -> None:
    """Check the version of jax, and warn if the other project called `pw` is installed; once a process.

    Raises:
        VersionMismatch: jax or jaxlib has another version, or is not installed; says what to install.
    """
    wanted = pins()
    here = {name: version(name) for name in wanted}
    if here != wanted:
        found = " and ".join(f"{name} {here[name]}" for name in wanted)
        command = " ".join(f"{name}=={wanted[name]}" for name in wanted)
        raise VersionMismatch(
            f"pw {version(DISTRIBUTION)} works with jax {wanted.get('jax')} only, and this environment has "
            f"{found}; run: pip install {command}"
        )
    if version(NAMESAKE) != "unknown":
        warnings.warn(
            f"another project, also called {NAMESAKE!r}, is installed in the same folder as "
            f"{DISTRIBUTION}, and each overwrites files of the other; run: pip uninstall {NAMESAKE}, then: "
            f"pip install --force-reinstall --no-deps {DISTRIBUTION}",
            stacklevel=3,
        )


DASHBOARD = ("starlette", "uvicorn", "prometheus_client")
"""The modules of the extra `dashboard`."""


def check_extra(extra: str, *modules: str) -> None:
    """Raise Error unless these modules of an optional extra are installed; says what to install."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Error(
                f"{module} is missing; run: pip install '{DISTRIBUTION}[{extra}]'"
            ) from error


def is_installed(*modules: str) -> bool:
    """Whether all these modules are installed; imports only the packages around them."""
    with contextlib.suppress(ModuleNotFoundError):  # of a package around it
        return all(find_spec(module) is not None for module in modules)
    return False
