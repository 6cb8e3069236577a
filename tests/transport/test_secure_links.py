"""Links over TLS: which peers get one, what the others are told, and what the listener writes down."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import uvloop

from pw.core.errors import ConnectionFailed
from pw.core.ids import CONTROLLER, Address
from pw.core.messages import Fetched, PeerRefused, Ready
from pw.core.messages.roles import Role, role_of
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials
from pw.transport.links import nearby, strangers
from pw.transport.streams.tls_stream import TlsStream
from tests.stages.cluster import Cluster, Recorder, authority, make_cluster, numbers, wire_bytes


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster("tls", tmp_path, uv=True)


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """The audit lines of an event."""
    caplog.set_level(logging.INFO, "pw.audit")

    def lines(event: str) -> list[str]:
        found = [record for record in caplog.records if record.name == "pw.audit"]
        return [one.message for one in found if one.message.startswith(f"{event} ")]

    return lines


@pytest.fixture
def issue(tmp_path: Path) -> Callable[..., Credentials]:
    """Credentials of the authority of all clusters here, or of another."""
    return lambda *about, of=None, **how: Credentials.read(
        write(tmp_path / f"{'-'.join(map(str, about))}-{os.urandom(4).hex()}", *about, of=of), **how
    )


def write(file: Path, role: Role, name: str, tenant: str = "", of: Authority | None = None) -> Path:
    file.touch(0o600)
    file.write_bytes((of or authority()).issue(role, name, tenant))
    return file


def meet(cluster: Cluster, listener: Recorder, dialler: Recorder) -> None:
    dialler.env.introduce(listener.env.address.node, cluster.endpoint(listener))
    dialler.env.send(listener.env.address, Ready(0))


def test_both_ends_know_each_other(
    cluster: Cluster, issue: Callable[..., Credentials], audit: Callable[[str], list[str]]
) -> None:
    a = cluster.node("a", credentials=issue(Role.WORKER, "a"))
    b = cluster.node(
        "client-b", listens=False, credentials=issue(Role.CLIENT, "laptop", "research")
    )
    meet(cluster, a, b)
    cluster.until(lambda: cluster.network(a).identity_of("client-b"))
    a.env.send(b.env.address, Ready(1))
    cluster.until(lambda: numbers(b) == [1])
    there = cluster.network(a).identity_of("client-b")
    assert there is not None
    assert (there.role, there.name, there.tenant) == (Role.CLIENT, "laptop", "research")
    assert str(cluster.network(b).identity_of("a")) == "worker a"
    assert a.env.tenant_of("client-b") == "research"
    assert a.env.tenant_of("a") == "operator"
    assert a.env.tenant_of("client-c") == ""
    (login,) = [line for line in audit("login") if "tenant=research" in line]
    assert "name=spiffe://pw/pw/client/research/laptop" in login
    assert "peer=127.0.0.1:" in login
    # The tenant stays known for messages that wait in the mailbox when the link ends.
    cluster.of(b).close()
    cluster.until(lambda: a.lost)
    assert a.env.tenant_of("client-b") == "research"
    assert cluster.network(a).identity_of("client-b") is None


def test_links_without_tls_have_the_operators_rights(tmp_path: Path) -> None:
    for plain in make_cluster("ipc", tmp_path, uv=True):
        a, b = plain.node("a"), plain.node("client-b", listens=False)
        meet(plain, a, b)
        plain.until(lambda a=a: a.env.tenant_of("client-b") == "operator")


# --- refusals ------------------------------------------------------------------------------------------


def refused(cluster: Cluster, dialler: Recorder) -> str:
    cluster.until(lambda: dialler.of(PeerRefused) or dialler.lost)
    assert dialler.lost == []
    report = dialler.of(PeerRefused)[0].error
    assert report.kind == "AccessRefused"
    assert isinstance(report.message, str)
    return report.message


def test_a_revoked_certificate_is_refused(
    cluster: Cluster,
    issue: Callable[..., Credentials],
    audit: Callable[[str], list[str]],
    tmp_path: Path,
) -> None:
    stolen = issue(Role.WORKER, "stolen")
    (tmp_path / "crl.pem").write_bytes(authority().revoke(stolen.own.serial))
    a = cluster.node("a", credentials=issue(Role.WORKER, "a", revoked=tmp_path / "crl.pem"))
    b = cluster.node("b", listens=False, credentials=stolen)
    meet(cluster, a, b)
    words = f"the certificate of the worker stolen is revoked (serial {stolen.own.serial})"
    assert words in refused(cluster, b)
    (line,) = audit("refused")
    assert words in line
    assert f"name={stolen.own.uri} serial={stolen.own.serial}" in line
    assert a.received == []


def expired(file: Path) -> Credentials:
    """Of a process that has not looked at its files since they were valid."""
    file.touch(0o600)
    file.write_bytes(authority().issue(Role.WORKER, "old", days=-60 / 86400))
    time_s = time.time() - 120
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: time_s)
        return Credentials.read(file)


def test_an_expired_certificate_is_refused(
    cluster: Cluster, audit: Callable[[str], list[str]], tmp_path: Path
) -> None:
    old = expired(tmp_path / "old")
    a, b = cluster.node("a"), cluster.node("b", listens=False, credentials=old)
    meet(cluster, a, b)
    assert "it has expired" in refused(cluster, b)
    (line,) = audit("refused")
    assert "expired" in line


def test_a_listener_whose_certificate_has_expired_is_refused(
    cluster: Cluster, audit: Callable[[str], list[str]], tmp_path: Path
) -> None:
    old = expired(tmp_path / "old")
    a, b = cluster.node("a", credentials=old), cluster.node("b", listens=False)
    meet(cluster, a, b)
    assert "the peer's certificate has expired" in refused(cluster, b)
    cluster.until(lambda: audit("refused"))
    assert "it has expired" in audit("refused")[0]


def test_a_process_of_another_cluster_is_refused(
    cluster: Cluster, issue: Callable[..., Credentials], audit: Callable[[str], list[str]]
) -> None:
    foreign = issue(Role.WORKER, "b", of=Authority.create())
    a, b = cluster.node("a"), cluster.node("b", listens=False, credentials=foreign)
    meet(cluster, a, b)
    assert "of another cluster" in refused(cluster, b)
    cluster.until(lambda: audit("refused"))
    (line,) = audit("refused")
    assert "of another cluster" in line
    assert "peer=127.0.0.1:" in line


@pytest.mark.parametrize(
    ("node", "role"),
    [
        (CONTROLLER, Role.WORKER),
        (CONTROLLER, Role.CLIENT),
        ("b", Role.CLIENT),
        ("client-b", Role.WORKER),
    ],
)
def test_a_name_of_another_role_is_refused(
    cluster: Cluster,
    issue: Callable[..., Credentials],
    audit: Callable[[str], list[str]],
    node: str,
    role: Role,
) -> None:
    a = cluster.node("a")
    b = cluster.node(node, listens=False, credentials=issue(role, "me"))
    meet(cluster, a, b)
    words = f"{node} is the name of a {role_of(node)}, but its certificate is that of {role} me"
    assert words in refused(cluster, b)
    (line,) = audit("refused")
    assert words in line
    assert f"node={node}" in line
    assert a.received == []


def test_nothing_is_said_to_a_listener_of_another_role(
    cluster: Cluster, issue: Callable[..., Credentials]
) -> None:
    """A client that listens at the controller's address does not get what is meant for that."""
    false = cluster.node(CONTROLLER, credentials=issue(Role.CLIENT, "false"))
    b = cluster.node("b", listens=False)
    meet(cluster, false, b)
    words = "its certificate is that of client false of tenant false, not of a controller"
    assert words in refused(cluster, b)
    assert cluster.of(false).counters["frames_received"] == 0


def test_a_process_without_tls_is_told_that_the_other_uses_it(
    cluster: Cluster, audit: Callable[[str], list[str]]
) -> None:
    a = cluster.node("a")
    b = cluster.node("b", listens=False, credentials=None, insecure=True)
    meet(cluster, a, b)
    assert "it uses TLS, and this process does not" in refused(cluster, b)
    (line,) = audit("refused")
    assert "it does not use TLS" in line


def test_a_process_with_credentials_does_not_talk_to_one_without(cluster: Cluster) -> None:
    a = cluster.node("a", credentials=None, insecure=True)
    b = cluster.node("b", listens=False)
    meet(cluster, a, b)
    assert "it does not use TLS, and this process has credentials" in refused(cluster, b)


def test_without_credentials_a_listener_takes_nothing_over_tcp(
    cluster: Cluster, audit: Callable[[str], list[str]]
) -> None:
    a = cluster.node("a", credentials=None)
    b = cluster.node("b", listens=False)
    meet(cluster, a, b)
    assert "the peer has no credentials, so it takes no tcp connection" in refused(cluster, b)
    (line,) = audit("refused")
    assert "no process may connect over tcp" in line
    # A process of this user on this machine needs no tcp.
    c = cluster.node("c", listens=False, credentials=None)
    meet(cluster, a, c)
    cluster.until(lambda: numbers(a) == [0])
    d = cluster.node("d", listens=False, credentials=None, insecure=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearby, "dial", lambda where: None)
        meet(cluster, a, d)
        assert "it uses TLS" in refused(cluster, d)


def test_without_credentials_another_machine_is_not_dialled(cluster: Cluster) -> None:
    b = cluster.node("b", listens=False, credentials=None)
    b.env.introduce("a", "tcp://192.0.2.1:7777")
    b.env.send(Address("a", "main"), Ready(0))
    words = refused(cluster, b)
    assert "on another machine" in words
    assert "--credentials" in words
    assert "--insecure" in words


def test_without_credentials_only_this_users_processes_are_dialled(cluster: Cluster) -> None:
    """The listener uses TLS, and so has no unix socket; the dialler looks for one until its time is over."""
    a = cluster.node("a")
    b = cluster.node("b", listens=False, credentials=None, heartbeat_s=0.02, connect_s=0.2)
    meet(cluster, a, b)
    cluster.until(lambda: b.lost)
    ((_, reason),) = b.lost
    assert "no process of this user listens there" in reason
    assert "--credentials" in reason


def test_a_listener_that_nothing_could_reach_is_an_error(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearby, "listen", lambda endpoint: None)
    with pytest.raises(ConnectionFailed, match=r"no process could connect .* --credentials"):
        cluster.node("a", credentials=None)


# --- names -----------------------------------------------------------------------------------------------


def test_no_incarnation_takes_a_live_name_from_another_identity(
    cluster: Cluster, issue: Callable[..., Credentials], audit: Callable[[str], list[str]]
) -> None:
    a = cluster.node("a")
    b = cluster.node("client-b", listens=False, credentials=issue(Role.CLIENT, "b"))
    meet(cluster, a, b)
    cluster.until(lambda: cluster.network(a).identity_of("client-b"))
    thief = cluster.node(
        "client-b", incarnation=2**62, listens=False, credentials=issue(Role.CLIENT, "thief")
    )
    meet(cluster, a, thief)
    assert "the name client-b belongs to a process with another identity" in refused(cluster, thief)
    (line,) = audit("refused")
    assert "name=spiffe://pw/pw/client/thief/thief" in line
    there = cluster.network(a).identity_of("client-b")
    assert there is not None
    assert there.name == "b"
    assert not a.lost
    assert not b.lost


def test_the_same_identity_takes_its_name_with_a_newer_certificate(
    cluster: Cluster, issue: Callable[..., Credentials]
) -> None:
    a = cluster.node("a")
    for incarnation in (1, 2):
        b = cluster.node("b/7", incarnation, listens=False, credentials=issue(Role.WORKER, "b"))
        meet(cluster, a, b)
        cluster.until(lambda n=incarnation: numbers(a) == [0] * n)
    assert [reason for _, reason in a.lost] == ["replaced by a newer incarnation"]


@pytest.mark.parametrize("name", ["w1", "w10", "w1.x", "w", "x/w10/"])
def test_a_name_that_no_process_has_is_for_its_own_certificate_only(
    cluster: Cluster,
    issue: Callable[..., Credentials],
    audit: Callable[[str], list[str]],
    name: str,
) -> None:
    """The worker with that name is away, so nothing but the certificate says whose it is."""
    a = cluster.node("a")
    thief = cluster.node(name, listens=False, credentials=issue(Role.WORKER, "w1-0"))
    meet(cluster, a, thief)
    words = f"{name} is not the name of its certificate, which is that of worker w1-0"
    assert words in refused(cluster, thief)
    (line,) = audit("refused")
    assert words in line
    assert a.received == []


@pytest.mark.parametrize("name", ["w1", "w1/0", "w1/pod-7"])
def test_a_certificate_allows_its_name_and_more_after_a_slash(
    cluster: Cluster, issue: Callable[..., Credentials], name: str
) -> None:
    a = cluster.node("a")
    b = cluster.node(name, listens=False, credentials=issue(Role.WORKER, "w1"))
    meet(cluster, a, b)
    cluster.until(lambda: numbers(a) == [0])


def test_nothing_is_said_to_a_listener_with_another_name(
    cluster: Cluster, issue: Callable[..., Credentials]
) -> None:
    """A worker that listens at the address of another one does not get what is meant for that."""
    false = cluster.node("w1", credentials=issue(Role.WORKER, "w0"))
    b = cluster.node("b", listens=False)
    meet(cluster, false, b)
    assert "its certificate is that of worker w0, not of w1" in refused(cluster, b)
    assert cluster.of(false).counters["frames_received"] == 0


def test_a_name_that_is_dialled_is_not_given_to_another_identity(
    cluster: Cluster, issue: Callable[..., Credentials]
) -> None:
    """The listener has shown its certificate, but has not said its hello yet."""
    a = cluster.node("a", heartbeat_s=0.02)
    b = cluster.node("b", credentials=issue(Role.WORKER, "b"))
    meet(cluster, b, a)
    dialled = cluster.network(a).links["b"]
    cluster.until(lambda: dialled.out.is_open)
    thief = cluster.node("b", 2**62, listens=False, credentials=issue(Role.WORKER, "thief"))
    meet(cluster, a, thief)
    refused(cluster, thief)
    cluster.until(lambda: numbers(b) == [0])


def test_a_local_process_cannot_come_from_the_future(tmp_path: Path) -> None:
    hour_ns = 3600 * 10**9
    for plain in make_cluster("ipc", tmp_path, uv=True):
        a = plain.node("a")
        soon = plain.node("b", time.time_ns() + hour_ns // 2, listens=False)
        meet(plain, a, soon)
        plain.until(lambda a=a: numbers(a) == [0])
        late = plain.node("b", time.time_ns() + 2 * hour_ns, listens=False)
        meet(plain, a, late)
        assert "set the clock of this machine right" in refused(plain, late)
        assert not a.lost


# --- credentials that change -----------------------------------------------------------------------------


def test_new_links_use_new_credentials_and_old_links_live_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = write(tmp_path / "ours", Role.WORKER, "a")
    ours = Credentials.read(file, look_s=0.0)
    first = ours.own.serial
    a = cluster.node("a", credentials=ours, heartbeat_s=0.02)
    b = cluster.node("b", listens=False)
    meet(cluster, a, b)
    cluster.until(lambda: numbers(a) == [0])
    write(tmp_path / "new", Role.WORKER, "a").rename(file)
    cluster.until(lambda: ours.own.serial != first)
    c = cluster.node("c", listens=False)
    meet(cluster, a, c)
    cluster.until(lambda: numbers(a) == [0, 0])
    serials = []
    for one in (b, c):
        there = cluster.network(one).identity_of("a")
        assert there is not None
        serials.append(there.serial)
    assert serials == [first, ours.own.serial]
    b.env.send(a.env.address, Ready(1))
    cluster.until(lambda: numbers(a) == [0, 0, 1])
    assert not a.lost


def test_a_link_ends_when_its_certificate_is_revoked(
    cluster: Cluster,
    issue: Callable[..., Credentials],
    audit: Callable[[str], list[str]],
    tmp_path: Path,
) -> None:
    lists, stolen = tmp_path / "crl.pem", issue(Role.WORKER, "b")
    lists.write_bytes(authority().revoke())
    a = cluster.node(
        "a", credentials=issue(Role.WORKER, "a", revoked=lists, look_s=0.0), heartbeat_s=0.02
    )
    b = cluster.node("b", listens=False, credentials=stolen)
    c = cluster.node("c", listens=False)
    for one in (b, c):
        meet(cluster, a, one)
    cluster.until(lambda: numbers(a) == [0, 0])
    lists.write_bytes(authority().revoke(stolen.own.serial))
    serial = stolen.own.serial
    words = f"the certificate of worker b is revoked (serial {serial}); it needs a new one"
    assert words in refused(cluster, b)
    assert a.lost == [("b", words)]
    (line,) = audit("revoked")
    assert "node=b" in line
    c.env.send(a.env.address, Ready(1))
    cluster.until(lambda: numbers(a) == [0, 0, 1])


def test_a_process_with_a_new_certificate_connects_again_when_the_old_one_is_revoked(
    cluster: Cluster, issue: Callable[..., Credentials], tmp_path: Path
) -> None:
    lists, file = tmp_path / "crl.pem", tmp_path / "own.pem"
    lists.write_bytes(authority().revoke())
    ours = Credentials.read(write(file, Role.WORKER, "b"), look_s=0.0)
    old = ours.own.serial
    a = cluster.node(
        "a", credentials=issue(Role.WORKER, "a", revoked=lists, look_s=0.0), heartbeat_s=0.02
    )
    b = cluster.node("b", listens=False, credentials=ours)
    meet(cluster, a, b)
    cluster.until(lambda: numbers(a) == [0])
    write(file, Role.WORKER, "b")
    lists.write_bytes(authority().revoke(old))
    cluster.until(lambda: b.lost)
    ((peer, reason),) = b.lost
    assert peer == "a"
    assert reason.endswith("this process has a new certificate, and connects again")
    assert not b.of(PeerRefused)
    b.env.send(a.env.address, Ready(1))
    cluster.until(lambda: numbers(a) == [0, 1])
    assert ours.own.serial != old


# --- strangers -------------------------------------------------------------------------------------------


def dial(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def test_idle_strangers_do_not_keep_a_good_process_out(cluster: Cluster) -> None:
    a, b = cluster.node("a"), cluster.node("b", listens=False)
    with ExitStack() as idle:
        for _ in range(500):
            idle.enter_context(dial(cluster.endpoint(a)))
        counters, known = cluster.of(a).counters, cluster.network(a).connections
        cluster.until(
            lambda: counters["connections_crowded_out"] == 500 - strangers.STRANGERS_OF_ADDRESS
        )
        assert len(known) == strangers.STRANGERS_OF_ADDRESS
        meet(cluster, a, b)
        cluster.until(lambda: numbers(a) == [0])


def test_the_strangers_of_all_addresses_are_bounded(cluster: Cluster) -> None:
    a, b = cluster.node("a"), cluster.node("b", listens=False)
    bounds = cluster.network(a).strangers
    bounds.most, bounds.most_of_address = 5, 3
    host, _, port = cluster.endpoint(a).removeprefix("tcp://").rpartition(":")
    with ExitStack() as idle:
        for number in range(2, 22):
            raw = idle.enter_context(socket.socket())
            raw.bind((f"127.0.0.{number}", 0))
            raw.connect((host, int(port)))
        cluster.until(lambda: cluster.of(a).counters["connections_crowded_out"] == 15)
        meet(cluster, a, b)
        cluster.until(lambda: numbers(a) == [0])


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x01\x02\x00" + bytes(99)])
def test_a_slow_handshake_ends(cluster: Cluster, said: bytes) -> None:
    a = cluster.node("a")
    cluster.network(a).strangers.handshake_s = 0.05
    with dial(cluster.endpoint(a)) as raw:
        raw.sendall(said)
        raw.setblocking(False)
        cluster.until(lambda: cluster.of(a).counters["connections_malformed"])
        raw.setblocking(True)
        raw.settimeout(60)
        with suppress(ConnectionResetError):  # some of what was said may be unread
            assert raw.recv(100) == b""


def test_garbage_disturbs_no_link(cluster: Cluster, audit: Callable[[str], list[str]]) -> None:
    a, b = cluster.node("a"), cluster.node("b", listens=False)
    meet(cluster, a, b)
    cluster.until(lambda: numbers(a) == [0])
    garbage = [b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01", b"\x16" * 70_000, b""]
    for number, data in enumerate(garbage, 1):
        with dial(cluster.endpoint(a)) as raw:
            raw.sendall(data)
            b.env.send(a.env.address, Ready(number))
            cluster.until(lambda number=number: numbers(a)[-1] == number)
    assert not a.lost
    assert len(audit("refused")) <= len(garbage)


def test_many_refusals_are_a_few_lines(cluster: Cluster, audit: Callable[[str], list[str]]) -> None:
    a = cluster.node("a")
    for _ in range(50):
        with dial(cluster.endpoint(a)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    cluster.until(lambda: cluster.of(a).counters["connections_refused"] == 50)
    assert len(audit("refused")) == 1


# --- bytes -----------------------------------------------------------------------------------------------


def test_large_frames_cross_both_ways(cluster: Cluster) -> None:
    a, b = cluster.node("a"), cluster.node("b", listens=False)
    sent = [Fetched(number, os.urandom(size)) for number, size in enumerate((40 << 20, 1 << 20))]
    meet(cluster, a, b)
    cluster.until(lambda: numbers(a) == [0])
    for one, other in ((a, b), (b, a)):
        for message in sent:
            one.env.send(other.env.address, message)
    cluster.until(lambda: len(a.of(Fetched)) == len(b.of(Fetched)) == 2)
    assert a.of(Fetched) == b.of(Fetched) == sent


def test_bytes_wait_unencrypted_until_the_socket_takes_them(
    issue: Callable[..., Credentials],
) -> None:
    ours = issue(Role.WORKER, "a")
    data = os.urandom(8 << 20)

    async def scenario() -> None:
        left, right = socket.socketpair()
        for end in (left, right):
            end.setblocking(False)
        one = TlsStream(left, ours, dialled=True)
        other = TlsStream(right, ours, dialled=False)
        while not (one.is_open and other.is_open):
            for stream in (one, other):
                stream.is_open or stream.shake()
        assert not one.send(data)
        assert not one.send(b"more")
        heard = one.held() + other.held()
        while len(heard) < len(data) + 4:
            assert sum(map(len, one.encrypted)) <= wire_bytes(1 << 16)
            with suppress(BlockingIOError):
                heard += other.receive(1 << 20) or b""
            with suppress(BlockingIOError):
                one.flush()
        assert heard == data + b"more"
        assert not one.has_unsent
        one.close()
        assert other.receive(100) == b""
        other.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_the_last_words_are_sent(cluster: Cluster) -> None:
    a, b = cluster.node("a"), cluster.node("b", listens=False)
    meet(cluster, a, b)
    cluster.until(lambda: numbers(a) == [0])
    for number in range(1, 6):
        b.env.send(a.env.address, Fetched(number, bytes(50_000)))
    cluster.of(b).close()
    cluster.until(lambda: a.lost)
    assert a.lost == [("b", "closed")]
    assert len(a.of(Fetched)) == 5
