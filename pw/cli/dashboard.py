"""The command `pw dashboard`. Daemons and local clusters start it as a process, too."""

from __future__ import annotations

from typing import Annotated

import typer

from pw.cli.process import Credentials, Insecure, MetricsEndpoint, command, configure_logging
from pw.cli.target import Address, address_of
from pw.core import installed


def serve(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    bind: Annotated[
        str, typer.Option(help="Where browsers connect: tcp://host:port; `none` for no page.")
    ] = "tcp://127.0.0.1:8265-8365",
    metrics: MetricsEndpoint = "",
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Show a cluster on a page in a browser, until Ctrl-C; it prints the link, which has a token.

    The token is that of PW_DASHBOARD_TOKEN, else a new one. The page shows what the credentials may see. Off
    the loopback it needs them (TLS), or --insecure.

    Exit codes: 0 after SIGTERM or Ctrl-C; 1, with one line on standard error, after an error.
    """
    installed.check_extra("dashboard", *installed.DASHBOARD)
    from pw.cli import page

    configure_logging("warning")
    page.serve(address_of(address, credentials, insecure), bind, metrics, parent_fd)


def main() -> None:
    """Entry point of the process that daemons and clusters start."""
    command("pw-dashboard", serve)


if __name__ == "__main__":
    main()
