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
_WINDOW = re.compile(r"jax(?=[<>])(?=.*>=(?P<lowest>[\d.]+))(?=.*<=(?P<highest>[\d.]+))[<>=,\d.]+$")
"""The requirement of jax; builds order its two bounds as they like."""
_RELEASE = re.compile(r"\d+(\.\d+)+$")


def version(distribution: str) -> str:
    """The installed version of a distribution; "unknown" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def with_jax(release: str) -> str:
    """What pip installs for a release of jax."""
    return f"jax=={release} jaxlib=={release}"


def window() -> tuple[str, str] | None:
    """The lowest and the highest release of jax that pw works with; None for a checkout never installed."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    matches = (_WINDOW.match(requirement) for requirement in required)
    return next(((match["lowest"], match["highest"]) for match in matches if match), None)


@functools.cache
def check() -> None:
    """Check the version of jax, and warn if the other project called `pw` is installed; once a process.

    Raises:
        VersionMismatch: jax is not in the window, or jaxlib has another version; says what to install.
    """
    releases = window()
    if releases is not None:
        _check_jax(*releases)
    if version(NAMESAKE) != "unknown":
        warnings.warn(
            f"another project, also called {NAMESAKE!r}, is installed in the same folder as "
            f"{DISTRIBUTION}, and each overwrites files of the other; run: pip uninstall {NAMESAKE}, then: "
            f"pip install --force-reinstall --no-deps {DISTRIBUTION}",
            stacklevel=3,
        )


def _check_jax(lowest: str, highest: str) -> None:
    jax, jaxlib = version("jax"), version("jaxlib")
    works = _RELEASE.match(jax) and _numbers(lowest) <= _numbers(jax) <= _numbers(highest)
    if works and jaxlib == jax:
        return
    release = jax if works else highest
    raise VersionMismatch(
        f"pw {version(DISTRIBUTION)} works with jax {lowest} to {highest} and a jaxlib of the same version, "
        f"and this environment has jax {jax} and jaxlib {jaxlib}; run: pip install {with_jax(release)}"
    )


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]


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
