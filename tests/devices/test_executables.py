"""Compiled executables are code: none is loaded that another user may have written."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pw.devices.jax.executables import ExecutableFiles, machine

KEY = b"1" * 32
OTHER_USER = 65534
load = pickle.loads
"""Loading an executable runs code from a file."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


class Poison:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def caches() -> Iterator[Path]:
    """The folder in which the user's caches lie."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def poisoned(caches: Path) -> tuple[Path, Path, Path]:
    """The folder, a file in it that would be loaded for KEY, and what is there once it has been loaded."""
    folder, mark = caches / "pw" / "executables", caches / "loaded"
    ExecutableFiles(folder)
    file = folder / hashlib.sha256(KEY + machine()).hexdigest()
    content = pickle.dumps(Poison(mark))
    file.write_bytes(hashlib.sha256(content).digest() + content)
    file.chmod(0o600)
    return folder, file, mark


def test_what_is_this_users_alone_is_loaded(caches: Path) -> None:
    """So that the tests below test something."""
    folder, _, mark = poisoned(caches)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    ExecutableFiles(folder).load_with(KEY, load)
    assert mark.exists()


def link_to_another(folder: Path, file: Path) -> None:
    """The attacker's own link leads to a folder of the user that has something else in it."""
    other = folder.parent.parent / "downloads"
    folder.rename(other)
    folder.symlink_to(other)
    os.lchown(folder, OTHER_USER, OTHER_USER)


OPENED: dict[str, Callable[[Path, Path], None]] = {
    "others may write to the folder": lambda folder, file: folder.chmod(0o707),
    "the group may": lambda folder, file: folder.chmod(0o770),
    "others may write to the file": lambda folder, file: file.chmod(0o606),
    "others may rename the folder": lambda folder, file: folder.parent.chmod(0o777),
    "others may rename the one above": lambda folder, file: folder.parent.parent.chmod(0o777),
    "the file is a link": lambda folder, file: file.symlink_to(file.rename(folder.parent / "file")),
}
GIVEN_AWAY: dict[str, Callable[[Path, Path], None]] = {
    "the folder": lambda folder, file: os.chown(folder, OTHER_USER, OTHER_USER),
    "the file": lambda folder, file: os.chown(file, OTHER_USER, OTHER_USER),
    "the folder above": lambda folder, file: os.chown(folder.parent, OTHER_USER, OTHER_USER),
    "a link to another folder": link_to_another,
}


@pytest.mark.parametrize("how", OPENED)
def test_what_others_can_write_is_not_loaded(how: str, caches: Path) -> None:
    refuses(OPENED[how], caches)


@as_root
@pytest.mark.parametrize("whose", GIVEN_AWAY)
def test_what_belongs_to_another_user_is_not_loaded(whose: str, caches: Path) -> None:
    refuses(GIVEN_AWAY[whose], caches)


def refuses(change: Callable[[Path, Path], None], caches: Path) -> None:
    folder, file, mark = poisoned(caches)
    change(folder, file)
    executables = ExecutableFiles(folder)
    assert executables.load_with(KEY, load) is None
    assert executables.failed == 1
    assert not mark.exists()


def test_a_folder_is_looked_at_whenever_it_is_used(caches: Path) -> None:
    folder, _, mark = poisoned(caches)
    executables = ExecutableFiles(folder)
    folder.chmod(0o777)
    assert executables.load_with(KEY, load) is None
    assert not mark.exists()


def test_it_is_said_once_and_what_to_do(caches: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, file, _ = poisoned(caches)
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "pw"):
        for _ in range(3):
            ExecutableFiles(folder).load_with(KEY, load)
    assert len(caplog.records) == 3  # once each
    folder.chmod(0o700)
    file.chmod(0o666)
    caplog.clear()
    kept = ExecutableFiles(folder)
    with caplog.at_level(logging.WARNING, "pw"):
        for _ in range(3):
            assert kept.load_with(KEY, load) is None
    (record,) = caplog.records
    assert file.name in record.getMessage()
    assert "--compile-cache" in record.getMessage()


def test_folders_that_are_made_are_this_users_alone_whatever_the_umask(caches: Path) -> None:
    before = os.umask(0)
    try:
        folder = caches / "new" / "pw" / "executables"
        assert ExecutableFiles(folder).failed == 0
    finally:
        os.umask(before)
    for made in (folder, *list(folder.parents)[:2]):
        assert made.stat().st_mode & 0o777 == 0o700


def test_a_link_of_the_users_own_is_followed(caches: Path) -> None:
    (caches / "disk").mkdir(mode=0o700)
    (caches / "pw").symlink_to(caches / "disk")
    _, _, mark = poisoned(caches)
    ExecutableFiles(caches / "pw" / "executables").load_with(KEY, load)
    assert mark.exists()
