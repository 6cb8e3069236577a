"""Checks the installed versions of jax, and that no other project overwrites pw.

The distribution is called `openpathways`, the package that it installs `pw`. Another project on the
Python package index is called `pw` and installs a package of that name into the same folder.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import shlex
import warnings
from importlib import metadata
from importlib.util import find_spec

from pw.core.errors import Error, VersionMismatch

DISTRIBUTION = "openpathways"
NAMESAKE = "pw"
_WINDOW = re.compile(r"jax(?=[<>])(?=.*>=(?P<lowest>[\d.]+))(?=.*<=(?P<highest>[\d.]+))[<>=,\d.]+$")
"""Pattern of the requirement of jax; builds order its two bounds as they like."""
_RELEASE = re.compile(r"\d+(\.\d+)+$")


def version(distribution: str) -> str:
    """The installed version of a distribution; "unknown" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def wheel(version: str) -> str:
    """The file name of the wheel that `make wheel` builds of a version."""
    return f"{DISTRIBUTION}-{version}-py3-none-any.whl"


def with_jax(release: str) -> str:
    """Return the requirement that pip installs for a release of jax."""
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
            f"{DISTRIBUTION}, and each overwrites files of the other; run: pip uninstall {NAMESAKE}, then "
            f"install {DISTRIBUTION} as before, with --force-reinstall --no-deps",
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
"""Modules of the extra `dashboard`."""


def check_extra(extra: str, *modules: str) -> None:
    """Raise Error unless these modules of an optional extra are installed; says what to install."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Error(f"{module} is missing; run: pip install {_packages(extra)}") from error


def _packages(extra: str) -> str:
    """What pip installs for an extra: its packages, since the distribution is on no index."""
    packages = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires(DISTRIBUTION) or []:
            package, _, marker = requirement.partition("; ")
            if marker == f'extra == "{extra}"':
                packages.append(package)
    return shlex.join(packages or [f".[{extra}]"])


def is_installed(*modules: str) -> bool:
    """Whether all these modules are installed; imports only the packages around them."""
    with contextlib.suppress(ModuleNotFoundError):  # of a package around it
        return all(find_spec(module) is not None for module in modules)
    return False
