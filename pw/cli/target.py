"""The cluster that a command is about: its address, and how long it may take to answer."""

from __future__ import annotations

from typing import Annotated

import typer

from pw.cli.process import CONNECTION
from pw.core.errors import Error
from pw.transport.access.joined import default_address
from pw.transport.access.security import address_in, use_tcp

Address = Annotated[
    str,
    typer.Option(
        envvar="PW_ADDRESS",
        help="The controller's address, tcp://host:port; by default that of the joined cluster (`pw join`).",
        rich_help_panel=CONNECTION,
    ),
]

Timeout = Annotated[
    float,
    typer.Option(
        min=0.1, help="Seconds within which the controller must answer.", rich_help_panel=CONNECTION
    ),
]


def address_of(address: str, credentials: str, insecure: bool) -> str:
    """Return the address, else that in the credentials or of the joined cluster, and use tcp so.

    Raises:
        Error: there is none, or the credentials cannot be used.
    """
    use_tcp(credentials, insecure=insecure)
    address = address or address_in() or default_address()
    if not address:
        raise Error(
            "which cluster? Give its --address, or set PW_ADDRESS, or join one with `pw join`"
        )
    return address
