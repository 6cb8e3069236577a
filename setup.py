"""Builds the package; all but its version is in pyproject.toml.

The version is that of the commit: `0.1.2` with the tag `v0.1.2`, and `0.1.3.dev4+g0a1b2c3` four commits
later. An sdist and an archive of a commit (`git archive`) say it themselves. Where no tag is known, as in a
clone without tags, it is a version before `FIRST`.
"""

from __future__ import annotations

import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path

FIRST = "0.1.0"
"""The release that commits without a tag lead to. Its first two numbers are those of the next tag."""
ARCHIVED = "$Format:%(describe:tags,match=v[0-9]*)$"
"""What `git describe` says of the commit; `git archive` writes it here (.gitattributes)."""
_DESCRIBED = re.compile(r"v(\d+\.\d+\.)(\d+)(?:-(\d+)-(g[0-9a-f]+))?")


def version(folder: Path, archived: str = ARCHIVED) -> str:
    """Return the version of the sources in a folder."""
    if (folder / "PKG-INFO").exists():  # an sdist
        return str(HeaderParser().parsestr((folder / "PKG-INFO").read_text())["Version"])
    if not (folder / ".git").exists():
        return released(archived) or f"{FIRST}.dev0"
    described = released(_git(folder, "describe", "--tags", "--match", "v[0-9]*"))
    if described:
        return described
    commits, commit = (
        _git(folder, "rev-list", "--count", "HEAD"),
        _git(folder, "rev-parse", "--short", "HEAD"),
    )
    return f"{FIRST}.dev{commits}+g{commit}" if commits and commit else f"{FIRST}.dev0"


def released(described: str) -> str:
    """Return the version that follows from the words of `git describe`; empty if they name no release."""
    if not (match := _DESCRIBED.fullmatch(described)):
        return ""
    series, last, commits, commit = match.groups()
    return f"{series}{int(last) + 1}.dev{commits}+{commit}" if commits else f"{series}{last}"


def _git(folder: Path, *words: str) -> str:
    """Return what git says; empty if it fails, or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    from setuptools import setup

    setup(version=version(Path(__file__).resolve().parent))
