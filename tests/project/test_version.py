"""The version of the package: that of the tag, or what follows from the last one (setup.py)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import pw
from tests.stages.programs import ROOT

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)
    return done.stdout.decode().strip()


def commit(folder: Path, message: str) -> str:
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "--short", "HEAD")


def setup_of(folder: Path) -> ModuleType:
    spec = spec_from_file_location("setup_of_a_test", folder / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version(folder: Path) -> str:
    found: str = setup_of(folder).version(folder)
    return found


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q")
    for name in ("setup.py", ".gitattributes"):
        shutil.copy(ROOT / name, folder)
    git(folder, "add", ".")
    commit(folder, "first")
    return folder


def archived(clone: Path, folder: Path) -> Path:
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-C", clone, "archive", "HEAD"], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def test_a_tag_is_the_version_and_later_commits_lead_to_the_next(
    clone: Path, tmp_path: Path
) -> None:
    git(clone, "tag", "v0.3.7")
    assert version(clone) == "0.3.7"
    assert version(archived(clone, tmp_path / "at")) == "0.3.7"
    git(clone, "tag", "notes")  # is no version
    last = [commit(clone, "second"), commit(clone, "third")][1]
    assert version(clone) == f"0.3.8.dev2+g{last}"
    assert version(archived(clone, tmp_path / "behind")) == f"0.3.8.dev2+g{last}"


def test_without_tags_it_is_before_the_first_release(clone: Path, tmp_path: Path) -> None:
    first = setup_of(clone).FIRST
    last = commit(clone, "second")
    assert version(clone) == f"{first}.dev2+g{last}"
    assert version(archived(clone, tmp_path / "archive")) == f"{first}.dev0"
    shutil.rmtree(clone / ".git")
    assert version(clone) == f"{first}.dev0"


def test_an_sdist_in_another_repository_keeps_its_version(clone: Path) -> None:
    git(clone, "tag", "v0.3.7")
    sdist = clone / "vendored"
    sdist.mkdir()
    shutil.copy(ROOT / "setup.py", sdist)
    assert version(sdist) == f"{setup_of(sdist).FIRST}.dev0"
    (sdist / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: openpathways\nVersion: 0.2.5\n")
    assert version(sdist) == "0.2.5"


@pytest.mark.processes
def test_the_build_backend_takes_the_version_without_a_network(clone: Path, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (clone / "pw").mkdir()
    (clone / "pw" / "__init__.py").touch()
    git(clone, "tag", "v0.3.7")
    build = "from setuptools import build_meta; print(build_meta.build_sdist({!r}))"
    command = [sys.executable, "-c", build.format(str(tmp_path))]
    subprocess.run(command, cwd=clone, check=True, capture_output=True)
    assert (tmp_path / "openpathways-0.3.7.tar.gz").exists()


def test_the_package_says_the_version_that_is_installed() -> None:
    assert pw.__version__ == metadata.version("openpathways")
    assert re.match(r"\d+\.\d+\.\d+", pw.__version__)
