"""The proof of a cluster's secret: by itself, in the handshake of control links, and on the bulk plane."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pw.core.errors import Error, TransferFailed
from pw.core.messages import EdgeData, PeerRefused, Ready
from pw.transport import chunk_receiver, shared, shared_receiver
from pw.transport import proof as proof_module
from pw.transport import secret as secret_file
from pw.transport.bulk import BulkPlane
from pw.transport.proof import NO_PROOF, Proof, ProofError
from pw.transport.zmtp import Refusal, Zmtp, ZmtpError
from tests.cluster import Cluster, make_cluster, numbers
from tests.test_bulk import CHANNELS, land, noise, on_loop, push, until
from tests.test_zmtp import LARGEST, command, heard, said

SECRET, OTHER = b"a secret of a cluster", b"another cluster's one"


def exchange(dialler: Proof, listener: Proof) -> None:
    challenge = listener.answer(dialler.hello)
    listener.answer(dialler.answer(challenge))


def test_two_ends_with_one_secret_prove_it_to_each_other() -> None:
    ends = Proof(SECRET, b"bulk", False), Proof(SECRET, b"bulk", True)
    exchange(*ends)
    assert all(end.is_done for end in ends)


@pytest.mark.parametrize(
    ("secret", "plane"), [(OTHER, b"bulk"), (SECRET, b"control")], ids=["secret", "plane"]
)
def test_another_secret_or_plane_proves_nothing(secret: bytes, plane: bytes) -> None:
    dialler, listener = Proof(SECRET, b"bulk", False), Proof(secret, plane, True)
    with pytest.raises(ProofError, match=NO_PROOF):
        exchange(dialler, listener)
    assert not dialler.is_done
    assert not listener.is_done


def test_a_proof_cannot_be_used_twice_or_sent_back() -> None:
    """A process that has listened, or can ask one end for digests, can prove nothing to the other."""
    dialler, listener = Proof(SECRET, b"bulk", False), Proof(SECRET, b"bulk", True)
    hello = dialler.hello
    challenge = listener.answer(hello)
    answer = dialler.answer(challenge)
    second = Proof(SECRET, b"bulk", True)
    second.answer(hello)
    with pytest.raises(ProofError):
        second.answer(answer)
    third = Proof(SECRET, b"bulk", True)
    own = third.answer(hello)
    with pytest.raises(ProofError):
        third.answer(own[32:])  # the listener's own digest
    with pytest.raises(ProofError):
        Proof(SECRET, b"bulk", False).answer(challenge)


def test_the_secret_is_never_said() -> None:
    dialler, listener = Proof(SECRET, b"bulk", False), Proof(SECRET, b"bulk", True)
    challenge = listener.answer(dialler.hello)
    told = dialler.hello + challenge + dialler.answer(challenge)
    assert SECRET not in told
    assert len(told) == 32 + 64 + 32


# --- control links -----------------------------------------------------------------------------------


def end(kind: bytes, secret: bytes | None) -> Zmtp:
    return Zmtp(kind, LARGEST, secret)


def talk(one: Zmtp, other: Zmtp) -> None:
    for _ in range(6):
        words = said(one), said(other)
        for hears, word in ((one, words[1]), (other, words[0])):
            if word:
                heard(hears, word)


def test_after_the_proof_messages_travel_as_without_one() -> None:
    one, other = end(b"DEALER", SECRET), end(b"ROUTER", SECRET)
    talk(one, other)
    assert one.open
    assert other.open
    plain = Zmtp(b"DEALER", LARGEST).message(b"hello")
    assert one.message(b"hello") == plain
    assert other.whole(plain) == b"hello"


@pytest.mark.parametrize("secrets", [(None, SECRET), (SECRET, None), (OTHER, SECRET)])
def test_a_dialler_without_the_secret_hears_nothing(
    secrets: tuple[bytes | None, bytes | None],
) -> None:
    one, other = end(b"DEALER", secrets[0]), end(b"ROUTER", secrets[1])
    with pytest.raises(Refusal):
        talk(one, other)
    assert not one.open
    assert not other.open


@pytest.mark.parametrize("skipped", [b"INITIATE", b"READY", b"WELCOME"])
def test_no_step_of_the_proof_can_be_left_out(skipped: bytes) -> None:
    """Nor by a peer that says what it would say at the end."""
    from pw.transport.zmtp import metadata

    listener = end(b"ROUTER", SECRET)
    greeting = said(end(b"DEALER", SECRET))
    assert heard(listener, greeting) == []
    with pytest.raises(ZmtpError, match="in the handshake"):
        heard(listener, command(skipped, bytes(32) + metadata(b"DEALER")))
    assert not listener.open


def test_a_message_before_the_proof_is_not_taken() -> None:
    listener = end(b"ROUTER", SECRET)
    heard(listener, said(end(b"DEALER", SECRET)))
    with pytest.raises(ZmtpError, match="before the handshake"):
        heard(listener, b"\0\5hello")


@pytest.fixture(params=["tcp", "ipc"])
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster(request.param, tmp_path, uv=True)


def test_nodes_with_one_secret_talk(sockets: Cluster) -> None:
    a, b = sockets.node("a", secret=SECRET), sockets.node("b", listens=False, secret=SECRET)
    sockets.introduce(a, b)
    large = EdgeData(1, 1, bytes(1_000_000))
    b.env.send(a.env.address, Ready(0))
    b.env.send(a.env.address, large)
    sockets.until(lambda: a.of(EdgeData) == [large])
    assert numbers(a) == [0]


@pytest.mark.parametrize(
    ("listens", "dials", "words"),
    [
        (SECRET, None, "a proof that this process knows its cluster's secret"),
        (None, SECRET, "it has no secret"),
        (SECRET, OTHER, NO_PROOF),
    ],
    ids=["dialler has none", "listener has none", "another one"],
)
def test_a_node_without_the_secret_is_told_so_at_once(
    sockets: Cluster, listens: bytes | None, dials: bytes | None, words: str
) -> None:
    a = sockets.node("a", secret=listens)
    b = sockets.node("b", listens=False, secret=dials)
    sockets.introduce(a, b)
    b.env.send(a.env.address, Ready(0))
    sockets.until(lambda: b.of(PeerRefused))
    (refused,) = b.of(PeerRefused)
    assert refused.error.kind == "AccessRefused"
    assert words in refused.error.message
    assert "PW_SECRET_FILE" in refused.error.message
    assert a.received == []


# --- the bulk plane ----------------------------------------------------------------------------------


def plane(channel: str, folder: Path | None, secret: bytes | None) -> BulkPlane:
    loop = asyncio.get_running_loop()
    return BulkPlane(loop, channel=channel, folder=folder, secret=secret)


@pytest.mark.parametrize("where", ["folder", "nowhere"])
@pytest.mark.parametrize("channel", CHANNELS)
def test_planes_with_one_secret_move_bytes_of_every_size(
    channel: str, where: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        folder = tmp_path if where == "folder" else None
        sender, receiver = plane(channel, folder, SECRET), plane(channel, folder, SECRET)
        sources = [noise(size) for size in (0, 1, shared.INLINE_BYTES + 1, 9 << 20)]
        landings = [land(receiver, source.size) for source in sources]
        sent = [
            push(sender, landing, (0, x)) for (landing, _), x in zip(landings, sources, strict=True)
        ]
        assert [await each for each in sent] == [None] * len(sources)
        for (landing, arrival), source in zip(landings, sources, strict=True):
            assert np.array_equal(await arrival, source)
            if where == "folder":
                assert landing.endpoint.startswith(f"ipc://{tmp_path}/") == (channel == "tcp")
                assert landing.socket.startswith(f"{tmp_path}/") == (channel == "shared")
        # What came lies in pages of the receiver, which now shares them.
        back, arrived = land(sender, 9 << 20)
        assert await push(receiver, back, (0, await landings[-1][1])) is None
        assert np.array_equal(await arrived, sources[-1])
        sender.close()
        receiver.close()
        assert list(tmp_path.iterdir()) == []

    on_loop(scenario)


@pytest.mark.parametrize("sends", [None, OTHER], ids=["none", "another"])
@pytest.mark.parametrize("channel", CHANNELS)
def test_a_plane_without_the_secret_can_push_nothing(
    channel: str, sends: bytes | None, tmp_path: Path
) -> None:
    async def scenario() -> None:
        sender, receiver = plane(channel, tmp_path, sends), plane(channel, tmp_path, SECRET)
        for size in (100, 100_000):
            landing, arrival = land(receiver, size)
            outcome = await push(sender, landing, (0, noise(size)))
            if size > shared.INLINE_BYTES or channel == "tcp":  # else no sender waits for an answer
                assert isinstance(outcome, TransferFailed)
            assert not arrival.done()
        await until(lambda: receiver.counters()["rejected"] >= 1 or sends is OTHER)
        sender.close()
        receiver.close()

    on_loop(scenario)


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_plane_says_nothing_to_a_receiver_without_the_secret(
    channel: str, tmp_path: Path
) -> None:
    """A process in the place of a receiver gets a nonce, and none of the bytes."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        sender, receiver = plane(channel, tmp_path, SECRET), plane(channel, tmp_path, SECRET)
        landing, _ = land(receiver, 100)
        path = landing.socket or landing.endpoint.removeprefix("ipc://")
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.setblocking(False)
            impostor.bind(path)
            impostor.listen()
            outcome = push(sender, landing, (0, noise(100)))
            taken, _ = await loop.sock_accept(impostor)
            with taken:
                assert len(await loop.sock_recv(taken, 1000)) == 32
                await loop.sock_sendall(taken, bytes(64))
                assert await loop.sock_recv(taken, 1000) == b""
        assert NO_PROOF in str(await outcome)
        sender.close()
        receiver.close()

    on_loop(scenario)


@pytest.mark.parametrize("channel", CHANNELS)
def test_who_proves_nothing_is_not_waited_for(
    channel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (proof_module, shared_receiver, chunk_receiver):
        monkeypatch.setattr(module, "PROOF_S", 0.05)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        receiver = plane(channel, tmp_path, SECRET)
        landing, _ = land(receiver, 100)
        with socket.socket(socket.AF_UNIX) as mute:
            mute.setblocking(False)
            await loop.sock_connect(mute, landing.socket or landing.endpoint.removeprefix("ipc://"))
            assert await loop.sock_recv(mute, 100) == b""
        receiver.close()

    on_loop(scenario)


# --- where a secret is found -------------------------------------------------------------------------


def private_file(path: Path, text: str = "0123456789abcdef\n") -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_secret_is_found_beside_a_unix_socket_or_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    address, elsewhere = f"ipc://{tmp_path}/controller", "tcp://127.0.0.1:7777"
    assert secret_file.of_cluster(address) is None
    assert secret_file.of_cluster(elsewhere) is None
    monkeypatch.setenv("PW_SECRET", "the one of the environment")
    assert secret_file.of_cluster(elsewhere) == b"the one of the environment"
    monkeypatch.setenv("PW_SECRET_FILE", str(private_file(tmp_path / "named")))
    assert secret_file.of_cluster(elsewhere) == b"0123456789abcdef"
    assert secret_file.of_cluster(address) == b"0123456789abcdef"
    made = secret_file.create(tmp_path)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert secret_file.of_cluster(address) == made
    given = private_file(tmp_path / "given", "the one that is asked for")
    assert secret_file.of_cluster(address, str(given)) == b"the one that is asked for"
    tmp_path.chmod(0o755)  # others can be in there
    assert secret_file.of_cluster(address) == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [(0o640, "0123456789abcdef", "chmod 600"), (0o600, "hunter2", "shorter than 16"), (0, "", "")],
)
def test_a_secret_that_is_none_is_refused(tmp_path: Path, mode: int, text: str, words: str) -> None:
    file = tmp_path / "secret"
    if mode:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(Error, match=words or "cannot be read") as caught:
        secret_file.read(file)
    assert str(file) in str(caught.value)
    assert "hunter2" not in str(caught.value)
