"""`pw keys` makes, shows and revokes the certificates of a cluster; `pw join` installs a user's own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pw.core.errors import Error
from pw.core.messages.roles import Role
from pw.transport.access import joined, private_files
from pw.transport.access.identity import CREDENTIAL_DAYS, TRUST_DOMAIN, date_text

if TYPE_CHECKING:  # cryptography loads slowly, and other commands do not need it
    from pw.transport.access.keys_folder import KeysFolder

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    help="Make, show and revoke the certificates of a cluster (docs/security.md).",
)

Keys = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="The folder of the cluster's authority, by default ~/.config/pw/keys.",
    ),
]


def _folder(keys: Path | None) -> KeysFolder:
    from pw.transport.access.keys_folder import KeysFolder

    return KeysFolder(keys or joined.config_folder() / "keys")


@app.command()
def init(
    keys: Keys = None,
    trust_domain: Annotated[
        str, typer.Option(help="The trust domain that all identities of the cluster have.")
    ] = TRUST_DOMAIN,
) -> None:
    """Make the authority of a cluster. Keep its folder where no process of the cluster runs.

    Exit codes: 0; 1, with one line on standard error, if the folder has an authority already.
    """
    folder = _folder(keys)
    authority = folder.create(trust_domain)
    typer.echo(f"made the authority of the trust domain {authority.trust_domain} in {folder.path}")
    typer.echo(
        "next: pw keys issue controller NAME, pw keys issue worker NAME, and for pw join "
        "pw keys issue client NAME --address tcp://host:port"
    )


@app.command()
def issue(
    role: Annotated[Role, typer.Argument(help="What the process may be.")],
    name: Annotated[str, typer.Argument(help="Its name, as logs and `pw keys show` have it.")],
    tenant: Annotated[
        str,
        typer.Option(
            help="Of a client: all clients of a tenant may cancel each other's runs, and the tenant operator "
            "may do all. By default the NAME."
        ),
    ] = "",
    island: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Of a worker: an island that it may join; give it again for more. By default all.",
        ),
    ] = None,
    days: Annotated[
        float, typer.Option(min=0.01, help="How long they are valid.")
    ] = CREDENTIAL_DAYS,
    address: Annotated[
        str, typer.Option(help="The controller's address, tcp://host:port, for pw join.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write. By default NAME.pem.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the file, for a process that uses it.")
    ] = False,
    keys: Keys = None,
) -> None:
    """Issue credentials for a process: one file with a private key, its certificate and the authority's.

    Exit codes: 0; 1, with one line on standard error, if there is no authority, or the file exists.
    """
    file = out or Path(f"{name}.pem")
    if file.exists() and not replace:
        raise Error(f"{file} exists; add --replace, or name another file with --out")
    pem = _folder(keys).issue(role, name, tenant, days, address, island or ())
    private_files.write(file, pem)
    typer.echo(f"wrote {file}, for the {role} {name}: its private key is in it, so keep it secret")


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="Credentials to show instead: a file or a folder.")
    ] = None,
    keys: Keys = None,
) -> None:
    """List what was issued and revoked; or show what is in a file of credentials.

    Exit codes: 0; 1, with one line on standard error, if there is no authority, or the file cannot be used.
    """
    if file is not None:
        _show_file(file, _folder(keys).revocations())
        return
    from pw.client.display.tables import Table, plain

    folder = _folder(keys)
    authority, revoked = folder.authority(), folder.revocations()

    def state(serial: str, until: float) -> str:
        if serial in revoked:
            return f"revoked {date_text(revoked[serial])}"
        return "expired" if until < time.time() else "valid"

    rows = tuple(
        (
            one.role.value,
            one.name,
            one.tenant,
            ", ".join(one.islands),
            date_text(one.until),
            state(one.serial, one.until),
            one.serial,
        )
        for one in folder.issued()
    )
    columns = ("role", "name", "tenant", "islands", "until", "state", "serial")
    head = (
        f"authority of the trust domain {authority.trust_domain} in {folder.path}, until "
        f"{date_text(authority.expires.timestamp())}"
    )
    typer.echo(plain(head, [Table("Certificates", columns, rows)]))


def _show_file(path: Path, revoked: Mapping[str, float]) -> None:
    """Show what is in a file, and then whether it can be used.

    Args:
        revoked: when certificates were revoked, by serial number; empty without the authority's folder.
    """
    from pw.transport.access.certificates import identities_in
    from pw.transport.access.credentials import Credentials

    file = path / "tls.crt" if path.is_dir() else path
    content = private_files.read(file, private=False)
    for one in identities_in(content, str(file)):
        typer.echo(f"{one}, until {date_text(one.expires)}, serial {one.serial}, {one.uri}")
        if one.islands:
            typer.echo(f"may join only {', '.join(one.islands)}")
        if one.serial in revoked:
            typer.echo(f"revoked {date_text(revoked[one.serial])}")
    if address := joined.address_in(content):
        typer.echo(f"controller at {address}")
    Credentials.read(path)


@app.command()
def revoke(
    which: Annotated[
        str, typer.Argument(metavar="NAME|SERIAL", help="As pw keys show lists them.")
    ],
    keys: Keys = None,
) -> None:
    """Revoke a certificate, or all of a name, and write the revocation list for the processes of the cluster.

    Exit codes: 0; 1, with one line on standard error, if no such certificate was issued.
    """
    folder = _folder(keys)
    for one in folder.revoke(which):
        typer.echo(f"revoked the certificate of the {one} with the serial number {one.serial}")
    typer.echo(
        f"now give {folder.revoked_file} to each process of the cluster: as --revoked FILE or PW_REVOKED, or "
        "as crl.pem beside its tls.crt. A process reads the file again when it changes."
    )


def join(
    file: Annotated[Path, typer.Argument(help="Credentials that `pw keys issue client` has made.")],
    address: Annotated[
        str, typer.Option(help="The controller's address, tcp://host:port, if the file names none.")
    ] = "",
) -> None:
    """Join a cluster: install the credentials of this user, and the cluster's address.

    Later commands and `pw.connect()` use this cluster if no address is given and PW_ADDRESS is not set.

    Exit codes: 0; 1, with one line on standard error, if the credentials cannot be used.
    """
    from pw.transport.access.credentials import Credentials

    if file.is_dir():
        raise Error(f"{file} is a folder; pw join installs one file, so set PW_CREDENTIALS instead")
    credentials = Credentials.read(file)
    credentials.check_role(Role.CLIENT)
    where = address or credentials.address
    if not where:
        raise Error(f"{file} does not name the cluster's address; add --address tcp://host:port")
    if not where.startswith("tcp://") or len(where.split()) != 1:
        raise Error(f"{where!r} is no address; it looks like tcp://host:port")
    installed = joined.joined_file()
    before = joined.joined_address()
    private_files.make_folder(installed.parent)
    content = private_files.read(file)
    if where != credentials.address:
        content = f"pw-address: {where}\n".encode() + content
    private_files.write(installed, content)
    typer.echo(
        f"joined the cluster at {where}, as {credentials.own}, until {date_text(credentials.own.expires)}"
    )
    if before and before != where:
        typer.echo(f"this user had joined the cluster at {before}, and has left it")
    typer.echo(
        f"the credentials are in {installed}: pw and pw.connect() use them when no address is given and "
        "PW_ADDRESS is not set. `pw status` shows the cluster. To leave it, remove that file."
    )
