"""`pw keys` and `pw join`: what they write, whom they let read it, and what they say."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pw.cli import embedded
from pw.cli.main import app
from pw.client.connection import current, threads
from pw.core.errors import Error
from pw.core.messages.roles import Role
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials, credentials_for
from pw.transport.access.joined import default_address, joined_file
from tests.stages.daemons import Program, start_module
from tests.stages.programs import ROOT

ADDRESS = "tcp://10.0.0.1:7777"
Pw = Callable[..., str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without keys and credentials, in an empty directory; returns the folder of pw's settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("PW_ADDRESS", "PW_CREDENTIALS", "PW_REVOKED"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "config" / "pw"


@pytest.fixture
def pw(home: Path) -> Pw:
    """Runs a command of `pw`; returns its output, or raises its Error."""

    def run(*arguments: object) -> str:
        done = CliRunner().invoke(app, [str(one) for one in arguments], standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done.output

    return run


@pytest.fixture
def keys(pw: Pw) -> Pw:
    """Runs `pw keys`, where there is an authority."""
    pw("keys", "init", "--trust-domain", "lab")
    return lambda *arguments: pw("keys", *arguments)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def serial(file: str) -> str:
    return Credentials.read(file).own.serial


# --- pw keys -----------------------------------------------------------------------------------------


def test_an_authority_is_made_once_for_this_user_alone(keys: Pw, home: Path) -> None:
    folder = home / "keys"
    assert mode(folder) == 0o700
    assert mode(folder / "authority.key") == 0o600
    before = (folder / "authority.key").read_bytes()
    with pytest.raises(Error, match="has the authority of a cluster already"):
        keys("init")
    assert (folder / "authority.key").read_bytes() == before
    assert "trust domain lab in" in keys("show")
    assert "no certificates" in keys("show")


def test_each_cluster_may_have_a_folder_of_its_own(keys: Pw, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert str(other) in keys("init", "--keys", other)
    keys("issue", "worker", "w0")
    keys("issue", "worker", "another", "--keys", other)
    assert Credentials.read("w0.pem").own.trust_domain == "lab"
    assert Credentials.read("another.pem").own.trust_domain == "pw"
    assert "another" not in keys("show")
    assert "another" in keys("show", "--keys", other)


def test_without_an_authority_the_first_command_is_named(pw: Pw) -> None:
    for command in (["issue", "worker", "w0"], ["show"], ["revoke", "w0"]):
        with pytest.raises(Error, match="there is no authority in"):
            pw("keys", *command)


def test_others_may_not_read_the_authority_s_key(keys: Pw, home: Path) -> None:
    (home / "keys" / "authority.key").chmod(0o644)
    with pytest.raises(Error, match="other users can read the private key in"):
        keys("issue", "worker", "w0")


def test_others_may_not_write_to_the_folder(pw: Pw, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(Error, match="other users can write to"):
        pw("keys", "init", "--keys", folder)
    assert not list(folder.iterdir())


def test_credentials_are_one_private_file(keys: Pw) -> None:
    said = keys("issue", "client", "ann", "--tenant", "research", "--days", 7, "--address", ADDRESS)
    assert "wrote ann.pem, for the client ann" in said
    assert mode(Path("ann.pem")) == 0o600
    ann = Credentials.read("ann.pem")
    assert (ann.own.role, ann.own.name, ann.own.tenant) == (Role.CLIENT, "ann", "research")
    assert ann.own.expires == pytest.approx(time.time() + 7 * 86400, abs=3600)  # the clock may jump
    assert ann.address == ADDRESS
    head = Path("ann.pem").read_text().partition("-----BEGIN")[0].splitlines()
    assert head[0].startswith("# Credentials of the client ann of tenant research, until 20")
    assert head[-1] == f"pw-address: {ADDRESS}"
    keys("issue", "worker", "w0", "--out", "other.pem")
    assert Credentials.read("other.pem").own.role is Role.WORKER
    assert not Path("w0.pem").exists()


def test_an_existing_file_is_replaced_only_on_demand(keys: Pw) -> None:
    keys("issue", "worker", "w0")
    first = serial("w0.pem")
    with pytest.raises(Error, match=r"w0\.pem exists; add --replace"):
        keys("issue", "worker", "w0")
    assert serial("w0.pem") == first
    keys("issue", "worker", "w0", "--replace")
    assert serial("w0.pem") != first
    assert mode(Path("w0.pem")) == 0o600
    assert [path.name for path in Path().iterdir()] == ["w0.pem"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["worker", "a/b", "--out", "x"], "'a/b' is no name of a worker"),
        (["worker", "w0", "--tenant", "ann"], "only clients have a tenant"),
        (["client", "ann", "--address", "10.0.0.1"], "'10.0.0.1' is no address"),
        (["client", "ann", "--out", "missing/ann.pem"], "cannot be written: No such file"),
    ],
)
def test_what_cannot_be_issued_is_refused(keys: Pw, arguments: list[str], words: str) -> None:
    with pytest.raises(Error, match=words):
        keys("issue", *arguments)
    assert not list(Path().iterdir())


def test_an_unknown_role_is_refused(keys: Pw) -> None:
    with pytest.raises(typer.TyperException, match="boss"):
        keys("issue", "boss", "x")


def rows(table: str) -> list[list[str]]:
    lines = [re.split(r"  +", line.strip()) for line in table.splitlines()]
    return [line for line in lines if line[0] in list(Role)]


def test_what_was_issued_and_revoked_is_listed(keys: Pw, home: Path) -> None:
    keys("issue", "controller", "main")
    keys("issue", "client", "ann", "--tenant", "research")
    keys("issue", "worker", "w0")
    said = keys("revoke", "w0")
    revoked = serial("w0.pem")
    assert f"revoked the certificate of the worker w0 with the serial number {revoked}" in said
    assert str(home / "keys" / "revoked.pem") in said
    assert "--revoked FILE or PW_REVOKED" in said
    listed = rows(keys("show"))
    assert [(row[0], row[1], row[-1]) for row in listed] == [
        ("controller", "main", serial("main.pem")),
        ("client", "ann", serial("ann.pem")),
        ("worker", "w0", revoked),
    ]
    assert [row[-2].split()[0] for row in listed] == ["valid", "valid", "revoked"]


def test_a_revocation_list_names_all_that_was_revoked(keys: Pw, home: Path) -> None:
    for name in ("a", "b", "c"):
        keys("issue", "worker", name)
    first = serial("a.pem")
    keys("issue", "worker", "a", "--replace")
    lists = home / "keys" / "revoked.pem"
    none = Credentials.read("b.pem", lists)
    assert not none.is_revoked(none.own)
    keys("revoke", "a")  # both certificates of the name
    by_serial = serial("b.pem")
    keys("revoke", by_serial.upper())
    ours = Credentials.read("c.pem", lists)
    for file, one in (("a.pem", first), ("a.pem", serial("a.pem")), ("b.pem", by_serial)):
        assert ours.is_revoked(Credentials.read(file).own._replace(serial=one))
    assert not ours.is_revoked(ours.own)
    with pytest.raises(Error, match=r"b\.pem is revoked"):
        Credentials.read("b.pem", lists)


def test_a_revocation_must_name_one_process(keys: Pw, home: Path) -> None:
    keys("issue", "worker", "ann", "--out", "worker.pem")
    keys("issue", "client", "ann")
    with pytest.raises(Error, match=r"the name of several processes .client ann of .*, worker ann"):
        keys("revoke", "ann")
    with pytest.raises(Error, match="no certificate of 'bob' was issued here"):
        keys("revoke", "bob")
    Credentials.read("worker.pem", home / "keys" / "revoked.pem")
    keys("revoke", serial("worker.pem"))
    with pytest.raises(Error, match="is revoked already"):
        keys("revoke", serial("worker.pem"))
    Credentials.read("ann.pem", home / "keys" / "revoked.pem")


def test_the_content_of_a_file_is_shown_and_then_its_fault(keys: Pw) -> None:
    keys("issue", "client", "ann", "--address", ADDRESS)
    shown = keys("show", "ann.pem")
    assert "client ann of tenant ann, until 20" in shown
    assert f"serial {serial('ann.pem')}, spiffe://lab/pw/client/ann/ann" in shown
    assert f"controller at {ADDRESS}" in shown
    assert "PRIVATE" not in shown
    assert "revoked" not in shown
    keys("revoke", "ann")
    assert "revoked 20" in keys("show", "ann.pem")
    Path("ann.pem").chmod(0o644)
    with pytest.raises(Error, match="other users can read"):
        keys("show", "ann.pem")
    Path("empty.pem").write_text("")
    with pytest.raises(Error, match=r"no certificate in empty\.pem names a process of pw"):
        keys("show", "empty.pem")


def test_a_cluster_is_set_up_as_documented(pw: Pw) -> None:
    """The five commands of docs/security.md, and the rotation and the revocation below them."""
    text = (ROOT / "docs" / "security.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    assert len(blocks[0].splitlines()) == 5
    for line in "".join(blocks).splitlines():
        if line.startswith("pw "):
            pw(*line.split()[1:])
    assert joined_file().read_bytes() == Path("ann.pem").read_bytes()
    states = [(row[0], row[1], row[-2].split()[0]) for row in rows(pw("keys", "show"))]
    assert states == [
        ("controller", "main", "valid"),
        ("worker", "w0", "revoked"),
        ("client", "ann", "valid"),
        ("worker", "w0", "revoked"),
    ]


# --- pw join -----------------------------------------------------------------------------------------


def test_who_has_joined_needs_no_address(
    keys: Pw, pw: Pw, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert default_address() == ""
    with pytest.raises(Error, match=r"which cluster.*`pw join`"):
        pw("status")
    keys("issue", "client", "ann", "--address", "tcp://127.0.0.1:9")
    said = pw("join", "ann.pem")
    assert "joined the cluster at tcp://127.0.0.1:9, as client ann of tenant ann, until 20" in said
    assert str(joined_file()) in said
    assert mode(joined_file()) == 0o600
    assert default_address() == "tcp://127.0.0.1:9"
    credentials = credentials_for("tcp://127.0.0.1:9", role=Role.CLIENT)
    assert credentials is not None
    assert credentials.own == Credentials.read("ann.pem").own
    assert credentials_for("tcp://127.0.0.1:9", role=Role.WORKER) is None
    said = pw("doctor")
    assert "port: no process listens at tcp://127.0.0.1:9" in said
    assert "certificate: client ann" in said
    with pytest.raises(Error, match=r"tcp://127\.0\.0\.1:9 "):
        pw("status", "--timeout", 0.2)
    monkeypatch.setenv("PW_ADDRESS", "")
    assert default_address() == ""
    with pytest.raises(Error, match="which cluster"):
        pw("status")
    monkeypatch.setenv("PW_ADDRESS", "tcp://127.0.0.1:8")
    assert default_address() == "tcp://127.0.0.1:8"


def test_a_script_connects_to_the_joined_cluster(
    keys: Pw, pw: Pw, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def remote(address: str, **how: object) -> Any:
        asked.append(address)
        raise Error("far away")

    monkeypatch.setattr(threads, "remote", remote)
    monkeypatch.setattr(embedded, "start", lambda runtime: remote("embedded"))
    previous = current.use(None)
    try:
        keys("issue", "client", "ann", "--address", ADDRESS)
        addresses = []
        for joins in (False, True):
            if joins:
                pw("join", "ann.pem")
            for address in (None, "tcp://other:1"):
                with pytest.raises(Error, match="far away"):
                    current.connect(address)
        addresses, asked[:] = asked[:], []
        assert addresses == ["embedded", "tcp://other:1", ADDRESS, "tcp://other:1"]
        monkeypatch.setenv("PW_ADDRESS", "")
        with pytest.raises(Error, match="far away"):
            current.connect()
        assert asked == ["embedded"]
    finally:
        current.use(previous)


def test_the_address_may_be_given_when_joining(keys: Pw, pw: Pw) -> None:
    keys("issue", "client", "ann")
    with pytest.raises(Error, match="does not name the cluster's address; add --address"):
        pw("join", "ann.pem")
    with pytest.raises(Error, match="is no address"):
        pw("join", "ann.pem", "--address", "somewhere")
    assert not joined_file().exists()
    pw("join", "ann.pem", "--address", ADDRESS)
    assert default_address() == ADDRESS
    said = pw("join", "ann.pem", "--address", "tcp://10.0.0.2:1")
    assert f"had joined the cluster at {ADDRESS}, and has left it" in said
    assert default_address() == "tcp://10.0.0.2:1"
    assert "left" not in pw("join", joined_file())


def test_what_is_no_client_s_is_not_installed(keys: Pw, pw: Pw, tmp_path: Path) -> None:
    keys("issue", "worker", "w0", "--address", ADDRESS)
    with pytest.raises(Error, match=r"w0\.pem is for the worker w0.*pw keys issue client NAME"):
        pw("join", "w0.pem")
    with pytest.raises(Error, match="is a folder; pw join installs one file"):
        pw("join", tmp_path)
    with pytest.raises(Error, match="cannot be read: No such file"):
        pw("join", "none.pem")
    old = Path("old.pem")
    old.write_bytes(Authority.create().issue(Role.CLIENT, "ann", "", -1, ADDRESS))
    old.chmod(0o600)
    with pytest.raises(Error, match="has expired"):
        pw("join", old)
    assert not joined_file().exists()


@pytest.mark.processes
def test_a_mistake_is_one_line_of_the_program(home: Path, tmp_path: Path) -> None:
    one: Program = start_module("pw.cli.main", "keys", "show", folder=tmp_path)
    try:
        assert one.end() == 1
        assert one.err.startswith("pw: error: there is no authority in ")
        assert one.err.count("\n") == 1
    finally:
        one.kill()


def test_a_certificate_names_the_islands_of_a_worker(keys: Pw) -> None:
    keys("issue", "worker", "w0", "--island", "east", "--island", "west")
    assert Credentials.read("w0.pem").own.islands == ("east", "west")
    assert "may join only east, west" in keys("show", "w0.pem")
    assert "east, west" in keys("show")
    keys("issue", "worker", "w1")
    assert Credentials.read("w1.pem").own.islands == ()
    assert "may join only" not in keys("show", "w1.pem")
    with pytest.raises(Error, match="only workers join islands"):
        keys("issue", "client", "ann", "--island", "east")
    with pytest.raises(Error, match="'a b' is no island that a certificate can name"):
        keys("issue", "worker", "w2", "--island", "a b")
