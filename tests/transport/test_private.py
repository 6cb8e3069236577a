"""The private directory of a cluster: who can be in it, and who removes it."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pw.cli.process import Daemon
from pw.core.errors import ConnectionFailed
from pw.transport.access.private import PREFIX, PrivateFolder, base_folders, beside, free_endpoint


@pytest.fixture
def base() -> Iterator[Path]:
    """Where directories are made, with a path that is short enough."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    yield short
    for left in short.iterdir():
        for file in left.iterdir():
            file.unlink()
        left.rmdir()
    short.rmdir()


def test_the_last_to_leave_removes_it(base: Path) -> None:
    made = PrivateFolder.make([str(base)])
    assert made.path.parent == base
    assert made.path.stat().st_mode & 0o777 == 0o700
    (made.path / "controller").touch()
    worker = PrivateFolder.of(made.controller)
    assert worker is not None
    assert worker.path == made.path
    made.leave()
    assert made.path.exists()
    made.leave()
    worker.leave()
    assert not made.path.exists()


def test_the_last_to_leave_may_wait_for_one_that_was_killed(base: Path) -> None:
    made = PrivateFolder.make([str(base)])
    killed = PrivateFolder.of(made.controller)
    assert killed is not None
    threading.Timer(0.1, killed.let_go).start()
    made.leave(patience_s=30.0)
    assert not made.path.exists()


def test_a_process_waits_for_a_parent_that_was_killed(base: Path) -> None:
    """The parent's channel ends a moment before its lock."""
    made = PrivateFolder.make([str(base)])
    killed = PrivateFolder.of(made.controller)
    assert killed is not None
    here, there = socket.socketpair()
    loop = asyncio.new_event_loop()
    daemon = Daemon(loop, here.detach())
    there.close()
    loop.run_forever()  # until it hears of the end
    threading.Timer(0.1, killed.let_go).start()
    daemon.leave(made)
    assert not made.path.exists()
    loop.close()


def test_a_directory_of_the_users_own_is_never_removed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    stay = PrivateFolder.of(f"ipc://{tmp_path}/controller")
    assert stay is not None
    stay.leave()
    assert tmp_path.exists()


def test_what_killed_clusters_have_left_goes_when_another_is_started(base: Path) -> None:
    old, fresh, living, open_to_all = (base / f"{PREFIX}{name}" for name in "abcd")
    for folder in (old, fresh, living, open_to_all, base / "other"):
        folder.mkdir(mode=0o700)
    (old / "controller").touch()
    open_to_all.chmod(0o755)
    lives = PrivateFolder(living)
    for folder in (old, living, open_to_all):
        os.utime(folder, (1.0, 1.0))
    made = PrivateFolder.make([str(base)])
    left = {folder.name for folder in base.iterdir()}
    assert left == {f.name for f in (fresh, living, open_to_all, base / "other", made.path)}
    lives.leave()
    made.leave()


def test_a_forked_process_keeps_no_directory(base: Path) -> None:
    made = PrivateFolder.make([str(base)])
    here, there = socket.socketpair()
    process = os.fork()
    if process == 0:
        there.send(b"begun")
        there.recv(1)
        os._exit(0)
    try:
        assert here.recv(5) == b"begun"
        made.let_go()
        PrivateFolder(made.path).leave()
        assert not made.path.exists(), "the last process has left"
    finally:
        here.send(b"x")
        os.waitpid(process, 0)
        here.close(), there.close()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o711, 0o701])
def test_a_directory_that_others_can_enter_is_not_private(tmp_path: Path, mode: int) -> None:
    endpoint = f"ipc://{tmp_path}/controller"
    tmp_path.chmod(0o700)
    assert beside(endpoint) == tmp_path
    tmp_path.chmod(mode)
    assert beside(endpoint) is None
    assert PrivateFolder.of(endpoint) is None


def test_nor_is_a_link_to_one_or_one_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(own)
    assert beside(f"ipc://{tmp_path}/link/controller") is None
    monkeypatch.setattr(os, "geteuid", lambda: own.stat().st_uid + 1)
    assert beside(f"ipc://{own}/controller") is None


def test_what_is_not_beside_a_private_socket_listens_as_ever(tmp_path: Path) -> None:
    assert beside("tcp://127.0.0.1:7777") is None
    assert beside("ipc://@abstract") is None
    assert free_endpoint(None, "host") == "tcp://127.0.0.1:0"
    assert free_endpoint(tmp_path, "host") == f"ipc://{tmp_path}/host-*"


def test_where_directories_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's own place of the session; never where others could rename them, or the path is too long."""
    runtime, shared = tmp_path / "runtime", tmp_path / "shared"
    runtime.mkdir(mode=0o700)
    shared.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(shared))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    bases = partial(base_folders, len(str(runtime)) + 60)
    assert bases() == [str(runtime), str(shared), "/tmp"]
    runtime.chmod(0o755)
    assert bases() == [str(shared), "/tmp"]
    shared.chmod(0o777)
    assert bases() == ["/tmp"]
    shared.chmod(0o1777)
    assert bases() == [str(shared), "/tmp"]
    assert base_folders(len("/tmp") + 50) == ["/tmp"]
    assert base_folders(20) == []
    with pytest.raises(ConnectionFailed, match="set TMPDIR"):
        PrivateFolder.make([])
