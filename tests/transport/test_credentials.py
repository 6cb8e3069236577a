"""Credentials: which files are taken, whom they let in, and what errors say.

Both ends of TLS are objects in memory here, so no test needs sockets or waits.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.core.errors import AccessRefused, ConnectionFailed, Error
from pw.core.messages.roles import Role, role_of
from pw.transport.access import credentials as module
from pw.transport.access import private_files
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials, Identity, credentials_for, explain
from pw.transport.access.identity import island_of
from pw.transport.access.joined import joined_address, joined_file
from pw.transport.access.security import Security

ADDRESS = "tcp://10.0.0.1:7777"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("lab.example.com")


def write(file: Path, content: bytes, mode: int = 0o600) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    file.chmod(mode)
    return file


@pytest.fixture
def issued(authority: Authority, tmp_path: Path) -> Callable[..., Path]:
    """Writes credentials of the authority to a file."""

    def issue(role: Role = Role.WORKER, name: str = "w0", *more: Any) -> Path:
        return write(tmp_path / f"{role}-{name}.pem", authority.issue(role, name, *more))

    return issue


def shake_hands(dialler: ssl.SSLContext, listener: ssl.SSLContext) -> dict[str, Any]:
    """Connect two ends; the peer's certificate, or the error, of each."""
    wires = {"dialler": ssl.MemoryBIO(), "listener": ssl.MemoryBIO()}
    ends = {
        "dialler": dialler.wrap_bio(wires["listener"], wires["dialler"]),
        "listener": listener.wrap_bio(wires["dialler"], wires["listener"], server_side=True),
    }
    told: dict[str, Any] = {}
    for _ in range(6):
        for name, end in ends.items():
            if isinstance(told.get(name), Exception):
                continue
            try:
                end.do_handshake()
                told[name] = end.getpeercert(binary_form=True)
                assert end.version() == "TLSv1.3"
                end.read(1)  # TLS 1.3: a dialler hears of a refusal after its own part
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                told[name] = error
    return told


# --- who is let in -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("controller", Role.CONTROLLER),
        ("client-12-ab", Role.CLIENT),
        ("island-0-host", Role.WORKER),
        ("controller-2", Role.WORKER),
        ("client", Role.WORKER),
    ],
)
def test_a_node_name_says_the_role(name: str, role: Role) -> None:
    assert role_of(name) is role


def test_both_ends_know_each_other(issued: Callable[..., Path]) -> None:
    worker = Credentials.read(issued(Role.WORKER, "w0"))
    client = Credentials.read(issued(Role.CLIENT, "laptop", "ann", 30, ADDRESS))
    told = shake_hands(client.connect(), worker.accept())
    assert worker.identify(told["listener"]) == client.own
    assert client.identify(told["dialler"]) == worker.own
    assert (client.own.role, client.own.name, client.own.tenant) == (Role.CLIENT, "laptop", "ann")
    assert client.own.uri == "spiffe://lab.example.com/pw/client/ann/laptop"
    assert worker.own.uri == "spiffe://lab.example.com/pw/worker/w0"
    assert (str(client.own), str(worker.own)) == ("client laptop of tenant ann", "worker w0")
    assert client.own.expires == pytest.approx(
        time.time() + 30 * 86400, abs=3600
    )  # the clock may jump
    assert (client.address, worker.address) == (ADDRESS, "")


def test_the_tenant_of_a_client_is_its_name_by_default(issued: Callable[..., Path]) -> None:
    assert Credentials.read(issued(Role.CLIENT, "ann")).own.tenant == "ann"


def test_another_cluster_is_refused_by_both_ends(
    issued: Callable[..., Path], tmp_path: Path
) -> None:
    ours = Credentials.read(issued())
    foreign = write(
        tmp_path / "foreign", Authority.create("lab.example.com").issue(Role.WORKER, "w0")
    )
    theirs = Credentials.read(foreign)
    told = shake_hands(ours.connect(), theirs.accept())
    assert explain(told["dialler"]) == module.VERIFY[7]
    assert explain(told["listener"]) == module.ALERTS["ALERT_UNKNOWN_CA"]
    dialler = theirs.connect()
    dialler.verify_mode = ssl.CERT_NONE  # it lets anything in, so that the listener must refuse
    told = shake_hands(dialler, ours.accept())
    assert explain(told["listener"]) == module.VERIFY[7]
    assert explain(told["dialler"]) == module.ALERTS["ALERT_UNKNOWN_CA"]


def bare(protocol: int) -> ssl.SSLContext:
    """The context of an end that checks nothing and shows nothing."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_a_dialler_without_a_certificate_is_refused(issued: Callable[..., Path]) -> None:
    told = shake_hands(bare(ssl.PROTOCOL_TLS_CLIENT), Credentials.read(issued()).accept())
    assert "has shown no certificate: it has no --credentials" in explain(told["listener"])
    assert "wants a certificate, and this process has shown none" in explain(told["dialler"])


def test_an_older_tls_is_refused(issued: Callable[..., Path]) -> None:
    dialler = bare(ssl.PROTOCOL_TLS_CLIENT)
    dialler.maximum_version = ssl.TLSVersion.TLSv1_2
    told = shake_hands(dialler, Credentials.read(issued()).accept())
    assert (
        explain(told["listener"])
        == explain(told["dialler"])
        == module.ALERTS["UNSUPPORTED_PROTOCOL"]
    )


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + bytes(54)],
    ids=["HTTP", "ZMTP"],
)
@pytest.mark.parametrize("listens", [True, False])
def test_a_peer_without_tls_is_told_apart(
    issued: Callable[..., Path], greeting: bytes, listens: bool
) -> None:
    ours = Credentials.read(issued())
    context = ours.accept() if listens else ours.connect()
    inbox = ssl.MemoryBIO()
    end = context.wrap_bio(inbox, ssl.MemoryBIO(), server_side=listens)
    with pytest.raises(ssl.SSLWantReadError):
        end.do_handshake()
    inbox.write(greeting)
    with pytest.raises(ssl.SSLError) as caught:
        end.do_handshake()
    assert explain(caught.value) == module.NOT_TLS


def test_bytes_that_were_changed_on_the_way_are_told_apart(issued: Callable[..., Path]) -> None:
    ours = Credentials.read(issued())
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialler = ours.connect().wrap_bio(back, there)
    listener = ours.accept().wrap_bio(there, back, server_side=True)
    for end in (dialler, listener, dialler):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    changed = bytearray(there.read())
    changed[-1] ^= 1
    there.write(changed)
    with pytest.raises(ssl.SSLError) as caught:
        listener.do_handshake()
    assert explain(caught.value).startswith("TLS with the peer failed (")


def test_a_peer_that_leaves_is_told_apart(issued: Callable[..., Path]) -> None:
    inbox = ssl.MemoryBIO()
    inbox.write_eof()
    end = Credentials.read(issued()).connect().wrap_bio(inbox, ssl.MemoryBIO())
    with pytest.raises(ssl.SSLError) as caught:
        end.do_handshake()
    closed = "the peer closed the connection before it had shown its certificate"
    assert explain(caught.value) == explain(ConnectionResetError()) == closed


def test_a_peer_whose_certificate_has_expired_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, worker = Maker(), "spiffe://pw/pw/worker/w0"
    ours = Credentials.read(write(tmp_path / "new", maker.one_file(worker)))
    old = write(tmp_path / "old", maker.one_file(worker, days=-1))
    two_days_ago = time.time() - 2 * 86400
    monkeypatch.setattr(time, "time", lambda: two_days_ago)
    theirs = Credentials.read(old)
    told = shake_hands(theirs.connect(), ours.accept())
    assert explain(told["listener"]) == module.VERIFY[10]
    assert explain(told["dialler"]) == module.ALERTS["ALERT_CERTIFICATE_EXPIRED"]


def test_a_peer_of_another_trust_domain_is_refused(tmp_path: Path) -> None:
    """One authority may serve several trust domains."""
    maker = Maker()
    ours, theirs = (
        Credentials.read(
            write(tmp_path / domain, maker.one_file(f"spiffe://{domain}/pw/worker/w0"))
        )
        for domain in ("red", "blue")
    )
    told = shake_hands(ours.connect(), theirs.accept())
    with pytest.raises(AccessRefused, match="trust domain blue, and this process is of red"):
        ours.identify(told["dialler"])


def test_a_peer_without_an_identity_of_pw_is_refused(issued: Callable[..., Path]) -> None:
    maker = Maker()
    der = maker.leaf(["spiffe://pw/ns/default/sa/web"])[1].public_bytes(serialization.Encoding.DER)
    ours = Credentials.read(issued())
    with pytest.raises(AccessRefused, match="the peer's certificate names no process of pw"):
        ours.identify(der)
    with pytest.raises(AccessRefused, match="cannot be read"):
        ours.identify(b"garbage")
    for nothing in (b"", None):
        with pytest.raises(AccessRefused, match="shown no certificate"):
            ours.identify(nothing)


# --- revocation, and files that change ---------------------------------------------------------------


def der_of(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificates(pem)[0].public_bytes(serialization.Encoding.DER)


def test_a_revoked_peer_is_refused_from_the_next_look_on(tmp_path: Path) -> None:
    authority = Authority.create()
    good, bad = authority.issue(Role.CLIENT, "good"), authority.issue(Role.CLIENT, "bad")
    lists = write(tmp_path / "revoked.pem", authority.revoke())
    own = write(tmp_path / "own.pem", authority.issue(Role.CONTROLLER, "c"))
    now_s = 0.0
    ours = Credentials(own, lists, lambda: now_s)
    peer = ours.identify(der_of(bad))
    assert not ours.is_revoked(peer)
    write(lists, authority.revoke(peer.serial))
    assert not ours.refresh()  # looked at a moment ago
    now_s = 1.0
    assert ours.refresh()
    assert ours.is_revoked(peer)
    with pytest.raises(
        AccessRefused, match="certificate of the client bad of tenant bad is revoked"
    ):
        ours.identify(der_of(bad))
    other = ours.identify(der_of(good))
    again = Authority.read(authority.key, authority.certificate, lists.read_bytes())
    write(lists, again.revoke(other.serial))
    now_s = 2.0
    assert ours.refresh()
    assert ours.is_revoked(peer)
    assert ours.is_revoked(other)


@pytest.mark.parametrize("fault", ["expired", "half", "revoked"])
def test_a_new_revocation_list_counts_although_own_files_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    authority = Authority.create()
    lists = write(tmp_path / "revoked.pem", authority.revoke())
    own = write(tmp_path / "own.pem", authority.issue(Role.CONTROLLER, "c"))
    now_s = 0.0
    ours = Credentials(own, lists, lambda: now_s)
    peer = ours.identify(der_of(authority.issue(Role.WORKER, "w0")))
    if fault == "expired":
        later = ours.own.expires + 1
        monkeypatch.setattr(time, "time", lambda: later)
    elif fault == "half":
        write(own, own.read_bytes()[:300])
    else:
        authority.revoke(ours.own.serial)
    write(lists, authority.revoke(peer.serial))
    now_s = 1.0
    assert ours.refresh()
    assert ours.is_revoked(peer)
    assert ours.own.name == "c"
    now_s = 2.0
    assert not ours.refresh()


def test_a_revocation_list_of_another_authority_is_refused(
    issued: Callable[..., Path], tmp_path: Path
) -> None:
    lists = write(tmp_path / "revoked.pem", Authority.create().revoke("ab"))
    with pytest.raises(Error, match="not signed by the cluster's authority"):
        Credentials.read(issued(), lists)
    with pytest.raises(Error, match="there is no revocation list in"):
        Credentials.read(issued(), write(tmp_path / "empty.pem", b""))


def test_own_credentials_that_are_revoked_are_refused(tmp_path: Path) -> None:
    authority = Authority.create()
    own = write(tmp_path / "own.pem", authority.issue(Role.WORKER, "w0"))
    lists = write(tmp_path / "crl.pem", authority.revoke(Credentials.read(own).own.serial))
    with pytest.raises(Error, match=r"own\.pem is revoked; issue a new one"):
        Credentials.read(own, lists)


def test_new_files_are_for_new_links(authority: Authority, issued: Callable[..., Path]) -> None:
    now_s = 0.0
    path = issued()
    ours = Credentials(path, None, lambda: now_s)
    peer = Credentials.read(issued(Role.CLIENT, "ann"))
    first, context = ours.own, ours.accept()
    now_s = 1.0
    assert not ours.refresh()
    assert ours.accept() is context
    write(path, authority.issue(Role.WORKER, "w0"))
    now_s = 2.0
    assert ours.refresh()
    assert ours.own.serial != first.serial
    told = shake_hands(peer.connect(), ours.accept())
    assert peer.identify(told["dialler"]).serial == ours.own.serial


def test_files_that_cannot_be_used_replace_nothing(
    authority: Authority, issued: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    path = issued()
    ours = Credentials(path, None, lambda: now_s)
    first = ours.own
    write(path, b"half of a fi")
    now_s = 1.0
    assert not ours.refresh()
    now_s = 2.0
    assert not ours.refresh()
    assert ours.own == first
    assert caplog.text.count("credentials are not replaced") == 1
    write(path, authority.issue(Role.CLIENT, "ann"))
    now_s = 3.0
    assert not ours.refresh()
    assert ours.own == first
    assert "is for the client ann" in caplog.text
    write(path, authority.issue(first.role, "w0"))
    now_s = 4.0
    assert ours.refresh()
    assert ours.own != first


@pytest.mark.parametrize(("left_days", "warns"), [(6.9, True), (7.1, False)])
def test_a_certificate_that_expires_soon_is_logged_once(
    issued: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    left_days: float,
    warns: bool,
) -> None:
    now_s = 0.0
    ours = Credentials(issued(), None, lambda: now_s)
    assert "expire" not in caplog.text
    later = ours.own.expires - left_days * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    now_s = 1.0
    assert not ours.refresh()
    now_s = 2.0
    assert not ours.refresh()
    assert caplog.text.count("credentials expire soon") == warns
    assert bool(ours.end_in_words) is warns


def test_a_user_is_warned_when_the_certificate_expires_soon(
    issued: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Credentials(issued(Role.CLIENT, "ann"), None)
    later = ours.own.expires - 86400
    monkeypatch.setattr(time, "time", lambda: later)
    with (
        pytest.warns(UserWarning, match="expires 20.* ask for a new one, then run `pw join`"),
        pytest.raises(ConnectionFailed, match="within 0 s: nothing listens there"),
    ):
        Runtime(remote("tcp://127.0.0.1:9", security=Security(ours)), 1.0, 0, connect_s=0.3)


def test_a_new_authority_takes_over_while_both_are_trusted(tmp_path: Path) -> None:
    """Processes trust the old and the new one first; then each gets a certificate of the new one."""
    old, new = Authority.create(), Authority.create()
    before, after = (
        Credentials.read(
            write(tmp_path / str(number), one.issue(Role.WORKER, "w") + other.certificate)
        )
        for number, (one, other) in enumerate([(old, new), (new, old)])
    )
    told = shake_hands(before.connect(), after.accept())
    assert before.identify(told["dialler"]) == after.own
    assert after.identify(told["listener"]) == before.own


# --- errors about own files --------------------------------------------------------------------------


def parts(pem: bytes) -> tuple[bytes, bytes, bytes]:
    """Key, certificate, and the authority's."""
    key, own, root = [
        block + b"\n" for block in pem.partition(b"-----BEGIN")[2].split(b"-----BEGIN")
    ]
    return b"-----BEGIN" + key, b"-----BEGIN" + own, b"-----BEGIN" + root


def encrypted(key: bytes) -> bytes:
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"passphrase"),
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda key, own, root, _: own + root, "there is no private key in"),
        (lambda key, own, root, _: key, "there is no certificate in"),
        (lambda key, own, root, _: key + own, "there is no authority's certificate in"),
        (lambda key, own, root, other: parts(other)[0] + own + root, "does not belong to any"),
        (lambda key, own, root, other: key + own + parts(other)[2], "not issued by the authority"),
        (lambda key, own, root, _: encrypted(key) + own + root, "is encrypted; decrypt it"),
        (
            lambda key, own, root, _: key.replace(b"M", b"N") + own + root,
            "private key in .* cannot be",
        ),
        (lambda key, own, root, _: key + own[:60] + own[90:] + root, "certificate in .* cannot be"),
        (lambda key, own, root, _: b"", "there is no private key in"),
    ],
    ids=[
        "key",
        "certificate",
        "authority",
        "match",
        "issuer",
        "encrypted",
        "bad-key",
        "bad",
        "empty",
    ],
)
def test_incomplete_files_are_refused(
    authority: Authority, tmp_path: Path, changed: Callable[..., bytes], words: str
) -> None:
    other = Authority.create().issue(Role.WORKER, "w0")
    file = write(tmp_path / "own.pem", changed(*parts(authority.issue(Role.WORKER, "w0")), other))
    with pytest.raises(Error, match=words) as caught:
        Credentials.read(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"none\.pem cannot be read: No such file"):
        Credentials.read(tmp_path / "none.pem")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(
    authority: Authority, tmp_path: Path, mode: int
) -> None:
    file = write(tmp_path / "own.pem", authority.issue(Role.WORKER, "w0"), mode)
    with pytest.raises(Error, match=f"other users can read .*chmod 600 {file}"):
        Credentials.read(file)


@pytest.mark.parametrize(
    ("owner", "group", "mode", "private"),
    [
        (1000, 1000, 0o600, True),
        (1000, 1000, 0o400, True),
        (1000, 1000, 0o640, False),
        (0, 2000, 0o640, True),
        (0, 2000, 0o440, True),
        (0, 2000, 0o660, False),
        (0, 3000, 0o640, False),
        (0, 2000, 0o644, False),
        (1001, 1000, 0o600, False),
    ],
)
def test_a_secret_of_kubernetes_may_be_readable_by_the_group_of_its_pod(
    monkeypatch: pytest.MonkeyPatch, owner: int, group: int, mode: int, private: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [2000])
    status = os.stat_result((0o100000 | mode, 1, 1, 1, owner, group, 10, 0, 0, 0))
    assert private_files.is_private(status) is private


def test_certificates_that_are_not_valid_now_are_refused(
    authority: Authority,
    issued: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write(tmp_path / "old.pem", authority.issue(Role.WORKER, "old", "", -1))
    with pytest.raises(Error, match=r"old\.pem has expired, on 20.* UTC; issue a new one"):
        Credentials.read(file)
    file = issued()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    with pytest.raises(
        Error, match=r"is not valid before 20.* UTC; is this machine's clock right\?"
    ):
        Credentials.read(file)


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    authority = Authority.create(days=1)
    own = Credentials.read(write(tmp_path / "a", authority.issue(Role.WORKER, "w", "", 90))).own
    assert own.expires == authority.expires.timestamp()


def test_the_role_is_that_of_the_program(issued: Callable[..., Path]) -> None:
    client = Credentials.read(issued(Role.CLIENT, "ann"))
    client.check_role(Role.CLIENT)
    with pytest.raises(
        Error, match=r"for the client ann of tenant ann, and pw-worker needs .*worker"
    ):
        client.check_role(Role.WORKER)


@pytest.mark.parametrize(
    ("role", "name", "tenant", "address", "words"),
    [
        (Role.WORKER, "a/b", "", "", "'a/b' is no name of a worker"),
        (Role.WORKER, "..", "", "", "is no name of a worker"),
        (Role.CLIENT, "ann", "a b", "", "'a b' is no tenant of a client"),
        (Role.WORKER, "w0", "ann", "", "only clients have a tenant"),
        (Role.WORKER, "w0", "", "10.0.0.1:7777", "is no address; it looks like tcp://host:port"),
        (Role.WORKER, "w0", "", "tcp://a:1\nx", "is no address"),
    ],
)
def test_what_cannot_be_in_a_certificate_is_refused(
    authority: Authority, role: Role, name: str, tenant: str, address: str, words: str
) -> None:
    with pytest.raises(Error, match=words):
        authority.issue(role, name, tenant, 1, address)


def test_a_trust_domain_is_checked() -> None:
    with pytest.raises(Error, match="'Lab' is no trust domain"):
        Authority.create("Lab")


# --- certificates of another PKI ---------------------------------------------------------------------


class Maker:
    """Another PKI: RSA keys, a root, and an intermediate authority that issues."""

    def __init__(self) -> None:
        self.root = self.make("root", None, ca=True)
        self.between = self.make("between", self.root, ca=True)

    def make(
        self,
        name: str,
        issuer: Any,
        ca: bool = False,
        uris: Any = (),
        uses: Any = None,
        days: int = 9,
    ) -> tuple[Any, x509.Certificate]:
        kind = ec.generate_private_key(ec.SECP384R1()) if ca else None
        key = kind or rsa.generate_private_key(65537, 2048)
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Example"),
                x509.NameAttribute(NameOID.COMMON_NAME, name),
            ]
        )
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer[1].subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=10))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
        )
        if uris:
            names = [x509.DNSName("host"), *map(x509.UniformResourceIdentifier, uris)]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        return key, builder.sign(issuer[0] if issuer else key, hashes.SHA384())

    def leaf(self, uris: list[str], **more: Any) -> tuple[Any, x509.Certificate]:
        return self.make("leaf", self.between, False, uris, **more)

    def key_pem(self, key: Any) -> bytes:
        return key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )

    def one_file(self, uri: str, **more: Any) -> bytes:
        key, leaf = self.leaf([uri], **more)
        return self.key_pem(key) + b"".join(map(pem_of, (leaf, self.between[1], self.root[1])))

    def folder(self, folder: Path, uri: str, authority: x509.Certificate | None = None) -> Path:
        """As Kubernetes mounts a secret: names that lead through a link to one version."""
        key, leaf = self.leaf([uri])
        version = folder / f"..{time.time_ns()}"
        write(version / "tls.key", self.key_pem(key))
        write(version / "tls.crt", pem_of(leaf) + pem_of(self.between[1]), 0o644)
        write(version / "ca.crt", pem_of(authority or self.root[1]), 0o644)
        (folder / "..new").symlink_to(version.name)
        (folder / "..new").rename(folder / "..data")
        for name in ("tls.key", "tls.crt", "ca.crt"):
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(f"..data/{name}")
        return folder


def pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def maker() -> Maker:
    return Maker()


def test_the_folders_and_files_of_another_pki_work_together(maker: Maker, tmp_path: Path) -> None:
    folder = maker.folder(tmp_path / "mounted", "spiffe://Prod.example.com/pw/controller/main")
    listener = Credentials.read(folder)
    file = write(tmp_path / "f", maker.one_file("spiffe://prod.example.com/pw/client/research/ann"))
    dialler = Credentials.read(file)
    told = shake_hands(dialler.connect(), listener.accept())
    assert listener.identify(told["listener"]) == dialler.own
    found_identity: Identity = dialler.identify(told["dialler"])
    assert (found_identity.role, found_identity.name) == (Role.CONTROLLER, "main")
    assert (dialler.own.name, dialler.own.tenant) == ("ann", "research")


def test_the_intermediate_authority_alone_may_be_trusted(maker: Maker, tmp_path: Path) -> None:
    """The issuer of a secret may put itself, not its root, into ca.crt."""
    ends = [
        Credentials.read(
            maker.folder(tmp_path / name, f"spiffe://pw/pw/worker/{name}", maker.between[1])
        )
        for name in ("a", "b")
    ]
    told = shake_hands(ends[0].connect(), ends[1].accept())
    assert ends[0].identify(told["dialler"]).name == "b"
    assert ends[1].identify(told["listener"]).name == "a"


def test_a_mounted_folder_is_read_again_when_its_link_moves(maker: Maker, tmp_path: Path) -> None:
    now_s = 0.0
    folder = maker.folder(tmp_path / "mounted", "spiffe://pw/pw/worker/w0")
    ours = Credentials(folder, None, lambda: now_s)
    first = ours.own.serial
    maker.folder(folder, "spiffe://pw/pw/worker/w0")
    now_s = 1.0
    assert ours.refresh()
    assert ours.own.serial != first


def test_a_folder_may_have_a_revocation_list(maker: Maker, tmp_path: Path) -> None:
    folder = maker.folder(tmp_path / "mounted", "spiffe://pw/pw/worker/w0")
    leaf = maker.leaf(["spiffe://pw/pw/client/ann/ann"])[1]
    now = datetime.now(UTC)
    entry = x509.RevokedCertificateBuilder().serial_number(leaf.serial_number).revocation_date(now)
    lists = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(maker.between[1].subject)
        .last_update(now - timedelta(days=9))
        .next_update(now - timedelta(days=1))  # past its date: what is revoked stays so
        .add_revoked_certificate(entry.build())
        .sign(maker.between[0], hashes.SHA256())
    )
    now_s = 0.0
    ours = Credentials(folder, None, lambda: now_s)
    der = leaf.public_bytes(serialization.Encoding.DER)
    peer = ours.identify(der)
    write(folder / "crl.pem", lists.public_bytes(serialization.Encoding.PEM))
    now_s = 1.0
    assert ours.refresh()
    assert ours.is_revoked(peer)


@pytest.mark.parametrize(
    ("uris", "more", "words"),
    [
        ([], {}, "names no process of pw"),
        (["spiffe://pw/ns/default/sa/worker"], {}, "names no process of pw"),
        (["spiffe://pw/pw/worker/a", "spiffe://pw/pw/client/b/b"], {}, "names no process of pw"),
        (["spiffe://pw/pw/client/ann"], {}, "names no process of pw"),
        (["spiffe://pw/pw/worker/a/b"], {}, "names no process of pw"),
        (["spiffe://pw/pw/admin/a"], {}, "names no process of pw"),
        (["spiffe://pw/pw/Worker/a"], {}, "names no process of pw"),
        (["spiffe://p w/pw/worker/a"], {}, "names no process of pw"),
        (["spiffe://pw/pw/worker/w%20"], {}, "names no process of pw"),
        (["https://pw/pw/worker/w"], {}, "names no process of pw"),
        (["spiffe://pw/pw/worker/w"], {"uses": [ExtendedKeyUsageOID.SERVER_AUTH]}, "both ends"),
        (["spiffe://pw/pw/worker/w"], {"days": -1}, "has expired"),
    ],
)
def test_certificates_of_another_pki_that_do_not_fit_are_refused(
    maker: Maker, tmp_path: Path, uris: list[str], more: dict[str, Any], words: str
) -> None:
    key, leaf = maker.leaf(uris, **more)
    content = maker.key_pem(key) + b"".join(map(pem_of, (leaf, maker.between[1], maker.root[1])))
    with pytest.raises(Error, match=words):
        Credentials.read(write(tmp_path / "own.pem", content))


# --- which credentials a process has -----------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without credentials."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("PW_CREDENTIALS", raising=False)
    monkeypatch.delenv("PW_REVOKED", raising=False)
    return tmp_path / "config" / "pw"


def test_credentials_are_looked_for_in_order(
    home: Path, issued: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert credentials_for(ADDRESS) is None
    assert joined_address() == ""
    given, named, joined = (
        issued(Role.CLIENT, name, "", 1, ADDRESS) for name in ("given", "named", "joined")
    )
    assert joined_file() == home / "credentials.pem"
    write(joined_file(), joined.read_bytes())
    assert joined_address() == ADDRESS

    def name(*arguments: Any) -> str | None:
        credentials = credentials_for(*arguments)
        return credentials and credentials.own.name

    assert name(ADDRESS) == "joined"
    monkeypatch.setenv("PW_CREDENTIALS", str(named))
    assert name(ADDRESS) == name("tcp://10.0.0.2:7777") == "named"
    monkeypatch.setenv("PW_CREDENTIALS", "nowhere.pem")
    with pytest.raises(Error, match=r"nowhere\.pem cannot be read.*named by .*PW_CREDENTIALS"):
        name(ADDRESS)
    monkeypatch.setenv("PW_CREDENTIALS", str(named))
    assert name("ipc:///run/pw/controller") is None
    assert name(ADDRESS, given) == name("ipc:///run/pw/controller", given) == "given"


@pytest.mark.parametrize(
    ("joined", "address", "may_be_plain", "is_used"),
    [
        ("tcp://10.0.0.1:7777", "tcp://main.example:7777", False, True),
        ("tcp://10.0.0.1:7777", "tcp://[2001:db8::1]:8888", False, True),
        ("tcp://10.0.0.1:7777", "tcp://main.example:7777", True, False),
        ("tcp://10.0.0.1:7777", "tcp://10.0.0.1:7777", True, True),
        ("tcp://10.0.0.1:7777", "tcp://127.0.0.1:7777", False, False),
        ("tcp://127.0.0.1:7777", "tcp://localhost:7777", False, True),
        ("tcp://127.0.0.1:7777", "tcp://[::1]:8888", False, False),
        ("tcp://10.0.0.1:7777", "ipc:///run/pw/controller", False, False),
    ],
)
def test_a_joined_cluster_may_have_several_addresses(
    home: Path,
    issued: Callable[..., Path],
    joined: str,
    address: str,
    may_be_plain: bool,
    is_used: bool,
) -> None:
    write(joined_file(), issued(Role.CLIENT, "ann", "", 1, joined).read_bytes())
    assert (credentials_for(address, may_be_plain=may_be_plain) is not None) is is_used


def test_the_role_and_the_revocation_list_are_taken_into_account(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create()
    path = write(tmp_path / "own.pem", authority.issue(Role.CLIENT, "ann"))
    with pytest.raises(Error, match="pw-worker needs the certificate of a worker"):
        credentials_for(ADDRESS, path, role=Role.WORKER)
    credentials = credentials_for(ADDRESS, path, role=Role.CLIENT)
    assert credentials is not None
    lists = write(tmp_path / "revoked.pem", authority.revoke(credentials.own.serial))
    monkeypatch.setenv("PW_REVOKED", str(lists))
    with pytest.raises(Error, match="is revoked"):
        credentials_for(ADDRESS, path)


def test_secrets_follow_from_the_private_key_and_the_purpose(issued: Callable[..., Path]) -> None:
    file = issued(Role.CONTROLLER, "one")
    first = Credentials.read(file).derived(b"claims")
    assert len(first) == 32
    assert Credentials.read(file).derived(b"claims") == first
    assert Credentials.read(file).derived(b"other") != first
    assert Credentials.read(issued(Role.CONTROLLER, "two")).derived(b"claims") != first


# --- names and islands -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "name", "node", "may"),
    [
        (Role.WORKER, "w0", "w0", True),
        (Role.WORKER, "w0", "w0/1", True),
        (Role.WORKER, "w0", "w0/", True),
        (Role.WORKER, "w0", "w1", False),
        (Role.WORKER, "w0", "w00", False),
        (Role.WORKER, "w0", "w0-1", False),
        (Role.WORKER, "w0", "/w0", False),
        (Role.WORKER, "w0", "", False),
        (Role.WORKER, "controller", "controller", False),
        (Role.WORKER, "client-a", "client-a", False),
        (Role.CONTROLLER, "main", "controller", True),
        (Role.CLIENT, "ann", "client-7", True),
        (Role.CLIENT, "ann", "w0", False),
    ],
)
def test_a_worker_has_the_name_of_its_certificate(
    role: Role, name: str, node: str, may: bool
) -> None:
    assert Identity(role, name, "", "", 0.0, "pw").may_be(node) is may


def test_new_credentials_of_another_worker_are_not_taken(
    tmp_path: Path, authority: Authority
) -> None:
    now_s = 0.0
    file = write(tmp_path / "own.pem", authority.issue(Role.WORKER, "w0"))
    credentials = Credentials(file, None, lambda: now_s)
    write(file, authority.issue(Role.WORKER, "w1"))
    now_s = 10.0
    assert not credentials.refresh()
    assert credentials.own.name == "w0"


@pytest.mark.parametrize(
    "uri",
    [
        *("spiffe://other/pw/island/east", "spiffe://pw/pw/island/", "spiffe://pw/pw/island"),
        *("SPIFFE://pw/pw/island/a/b", "spiffe://pw/pw/island/a b"),
    ],
)
def test_a_bound_on_islands_that_cannot_be_read_does_not_count_as_none(uri: str) -> None:
    with pytest.raises(Error, match="allows no island"):
        island_of(uri, "pw")


def test_uris_that_are_no_islands_bound_nothing() -> None:
    assert island_of("spiffe://pw/pw/island/east", "pw") == "east"
    for uri in ("spiffe://pw/pw/worker/w0", "https://example.com/pw/island/east"):
        assert island_of(uri, "pw") is None
