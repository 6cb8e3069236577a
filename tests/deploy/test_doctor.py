"""`pw doctor` finds what is wrong with a machine, and says what to do."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pw.core.errors import AccessRefused
from pw.core.messages.roles import Role
from pw.operating.deploy.doctor import (
    ERROR,
    LATER,
    OK,
    WARNING,
    Finding,
    Report,
    before_up,
    compared,
    examine,
)
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials
from pw.transport.streams.tls_stream import TlsStream


def one(report: Report, subject: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.subject == subject]
    return finding


def test_a_machine_that_is_fine_says_so() -> None:
    report = examine()
    assert one(report, "versions").level == OK
    assert "GiB in this machine" in one(report, "memory").says
    assert report.versions.startswith("pw ")


def test_a_port_is_open_or_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        assert one(examine(address), "port").level == OK
    finding = one(examine(address), "port")
    assert finding.level == ERROR
    assert "start pw-controller there" in finding.remedy
    assert "cannot be reached" in one(examine("10.0.0.1"), "port").says


@pytest.fixture
def own(tmp_path: Path) -> tuple[Authority, Callable[[Role, Authority], str]]:
    def issue(role: Role, authority: Authority) -> str:
        file = tmp_path / f"{role}-{id(authority)}.pem"
        file.touch(0o600)
        file.write_bytes(authority.issue(role, "w"))
        return str(file)

    return Authority.create(), issue


@pytest.mark.parametrize(
    ("role", "words"),
    [(Role.CONTROLLER, ""), (Role.WORKER, "not of a controller"), (None, "another cluster")],
)
def test_both_ends_show_their_certificates(own: Any, role: Role | None, words: str) -> None:
    """As a process of the cluster sees a controller, another role, and that of another cluster."""
    authority, issue = own
    file = issue(role or Role.CONTROLLER, authority if role else Authority.create())

    def listen() -> None:
        accepted, _ = listening.accept()
        with accepted:
            stream = TlsStream(accepted, Credentials.read(file), dialled=False)
            with contextlib.suppress(AccessRefused, OSError):
                while not stream.shake():
                    pass
                stream.flush()
                accepted.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=listen)
        thread.start()
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        report = examine(address, issue(Role.CLIENT, authority))
        thread.join(60)
    assert one(report, "port").level == OK
    finding = one(report, "access")
    assert finding.level == (ERROR if words else OK), finding
    assert words in finding.says


def test_what_is_normal_before_a_cluster_is_up_is_no_error(tmp_path: Path) -> None:
    port, missing = (
        Finding(ERROR, "port", "no process listens at tcp://a:1", "start it", before_up=True),
        one(examine(credentials=str(tmp_path / "w.pem")), "certificate"),
    )
    other, there = Finding(ERROR, "versions", "old"), Finding(OK, "certificate", "w")
    assert missing.level == ERROR
    for findings, levels in (
        ({"a": [port, missing], "b": [other, missing]}, [LATER, LATER, ERROR, LATER]),
        ({"a": [port, missing], "b": [there]}, [ERROR, ERROR, OK]),
        ({"a": [port]}, [ERROR]),
    ):
        assert [finding.level for _, finding in before_up(findings)] == levels


@pytest.mark.parametrize(("days", "level"), [(90, OK), (2, WARNING), (-1, ERROR)])
def test_a_certificate_expires(tmp_path: Path, days: float, level: str) -> None:
    file = tmp_path / "w.pem"
    file.touch(0o600)
    file.write_bytes(Authority.create().issue(Role.WORKER, "w", days=days))
    finding = one(examine(credentials=str(file)), "certificate")
    assert finding.level == level
    assert (level == OK) or "pw keys issue" in finding.remedy


def test_a_folder_is_missing_or_another_one_elsewhere(tmp_path: Path) -> None:
    missing = one(examine(folders=[str(tmp_path / "none")]), "folder")
    assert missing.level == ERROR
    assert "mount the shared one there" in missing.remedy
    here = examine(folders=[str(tmp_path)])
    assert one(here, "folder").level == OK
    there = Report([], here.versions, here.time, {str(tmp_path): "1/1"})
    (wrong,) = [
        (where, f) for where, f in compared({"a": (here, 0), "b": (there, 0)}) if f.level == ERROR
    ]
    assert wrong[0] == "b"
    assert "is another folder than on a" in wrong[1].says


def test_machines_with_other_versions_and_clocks_are_named() -> None:
    reports = {
        "a": (Report([], "pw 1, jax 2", 0.0), 0.0),
        "b": (Report([], "pw 2, jax 2", 0.0), 30.0),
    }
    wrong = [str(finding) for where, finding in compared(reports) if finding.level == ERROR]
    assert "pw 2, jax 2 here, and pw 1, jax 2 on a" in wrong[0]
    assert "its clock is 30.0 s behind this one's" in wrong[1]


def test_limits_that_are_too_low_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 20, 1024))
    words = [str(one) for one in examine().findings if one.subject == "limits"]
    assert "LimitNOFILE=" in words[0]
    assert "ulimit -v unlimited" in words[1]
