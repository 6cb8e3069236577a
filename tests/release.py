"""`make release`: builds the sdist and the wheel of a tag, and tries both in clean environments.

For each Python from 3.11 to 3.13 that is here: an environment with only what the wheel asks for runs the
commands and the quickstart. Nothing is uploaded.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.stages.programs import ROOT

PYTHONS = ("3.11", "3.12", "3.13")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command that must succeed; return what it prints."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    words = [os.fspath(word) for word in command]
    return subprocess.run(
        words, cwd=cwd, env=environment, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def version() -> str:
    """Return the version of HEAD. Raises SystemExit unless it has the tag of a release."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    found: str = setup["version"](ROOT)
    if not re.fullmatch(r"\d+\.\d+\.\d+", found):
        raise SystemExit(
            f"error: HEAD is {found}, no release; run: git tag v{found.split('.dev')[0]}"
        )
    if found.split(".")[:2] != setup["FIRST"].split(".")[:2]:
        raise SystemExit(f"error: FIRST in setup.py is {setup['FIRST']}, but the tag is v{found}")
    return found


def interpreters() -> Iterator[tuple[str, str]]:
    """Yield the versions and paths of the Pythons that run here."""
    for wanted in PYTHONS:
        command = shutil.which(f"python{wanted}")
        code = "import sys, venv, ensurepip; print(sys.executable)"
        if command is not None:
            done = subprocess.run(
                [command, "-c", code], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                yield wanted, done.stdout.strip()
                continue
        print(f"Python {wanted} is not here: not tried")


def built(folder: Path) -> tuple[Path, Path]:
    """Build the sdist from the files of HEAD, and the wheel from the sdist; return both."""
    source = folder / "source"
    source.mkdir()
    archive = folder / "head.tar"
    run("git", "archive", f"--output={archive}", "HEAD")
    run("tar", "-xf", archive, "-C", source)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (sdist,) = folder.glob("openpathways-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, sdist)
    (wheel,) = folder.glob("openpathways-*.whl")
    return sdist, wheel


def tried(python: str, wheel: Path, folder: Path, expected: str) -> None:
    """Install a wheel in a clean environment and use it. Raises CalledProcessError."""
    run(python, "-m", "venv", folder / "venv")
    bin_folder = folder / "venv" / "bin"
    pip = [bin_folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, f"{wheel}[deploy]")
    assert run(bin_folder / "pw", "version", cwd=folder).startswith(f"pw {expected} with jax")
    for command in ("pw-controller", "pw-worker"):
        run(bin_folder / command, "--help", cwd=folder)
    script = shutil.copy(ROOT / "examples" / "quickstart.py", folder)
    assert "array(" in run(bin_folder / "python", script, cwd=folder)


def main() -> None:
    """Build in dist/, and try what was built."""
    expected = version()
    with tempfile.TemporaryDirectory(prefix="pw-release-") as name:
        folder = Path(name)
        sdist, wheel = built(folder)
        for number, python in interpreters():
            (folder / number).mkdir()
            tried(python, wheel, folder / number, expected)
            print(f"Python {number}: {wheel.name} works")
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in (sdist, wheel):
            shutil.copy(file, ROOT / "dist")
            print(f"wrote dist/{file.name}")


if __name__ == "__main__":
    main()
