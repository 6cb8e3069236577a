"""Shared by all commands: one-line errors, logging, signals, the watch on the parent, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import platform
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from typing import Annotated, Any, NoReturn, TypeVar

import numpy as np
import typer

from pw.core.errors import ConnectionFailed, Error
from pw.core.sizes import parse_size
from pw.processes.channel import Channel
from pw.processes.child import EXIT_ERROR as EXIT_ERROR
from pw.processes.child import Announcement
from pw.transport.access.private import PrivateFolder
from pw.transport.access.security import CLOSED, Security
from pw.transport.endpoints import is_here, look_up, parse, parse_bind
from pw.transport.log import FIELDS, recent

T = TypeVar("T")

EXIT_OK = 0
EXIT_UNAVAILABLE = 69
"""Exit code if the controller cannot be reached."""
EXIT_AGAIN = 75
"""Exit code of an incarnation that is over; start the next one."""
EXIT_REFUSED = 77
"""Exit code if the credentials cannot be used, or the controller refuses them; the operator may mend that."""

GC_ALLOCATIONS = 10_000
"""The threshold of the youngest generation: allocations minus deallocations."""

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_FORM = "PW_LOG_FORMAT"
LogForm = Annotated[
    str,
    typer.Option(
        "--log-format", metavar="text|json", help="A line of text or a JSON document a record."
    ),
]
CREDENTIALS_HELP = (
    "This process's certificate and key, and the cluster's authority: a file of `pw keys issue`, or a folder "
    "with tls.crt, tls.key and ca.crt. With them all tcp links are encrypted, and their ends known. By default "
    "PW_CREDENTIALS."
)
REVOKED_HELP = "A file with revocation lists of the authority; by default PW_REVOKED."
INSECURE_HELP = (
    "Use tcp without encryption, and let every process in that reaches a port: only on a network that you "
    "trust. Also with PW_INSECURE=1."
)
PRIVATE_HELP = (
    "The numeric address at which this machine's part of the hosts' own traffic listens (XLA's "
    "coordination and collectives, which are not encrypted): one of a network of the cluster's own. By default "
    "that of --bind."
)
PrivateAddress = Annotated[str, typer.Option(metavar="ADDRESS", help=PRIVATE_HELP)]
CONNECTION = "Connection"
"""Group, in helps, of the options that are alike in most commands."""
Credentials = Annotated[
    str, typer.Option(metavar="PATH", help=CREDENTIALS_HELP, rich_help_panel=CONNECTION)
]
Revoked = Annotated[str, typer.Option(metavar="FILE", help=REVOKED_HELP)]
MetricsEndpoint = Annotated[
    str,
    typer.Option(
        metavar="ENDPOINT", help="Serve metrics for Prometheus there, as tcp://127.0.0.1:9464."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help=INSECURE_HELP, rich_help_panel=CONNECTION)
]


def versions() -> str:
    """Return the installed versions, for people."""
    from pw.transport.links.link import Versions

    return f"{Versions.installed()}, Python {platform.python_version()}"


def _show_versions(asked: bool) -> None:
    if asked:
        typer.echo(versions())
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_show_versions,
        is_eager=True,  # before it is noticed that other options are missing
        help="Show the installed versions and end.",
    ),
]
TWO_WAYS = (
    "give --credentials PATH (`pw keys` makes them, see docs/clusters.md), or --insecure if you trust every "
    "process on that network"
)
STALL_HELP = "Seconds without any progress after which the log says why (see also pw why)."
LEAST_HEARTBEAT_S = 0.1
LEAST_PERIOD_S = 1.0
"""Least seconds between two tests of the devices."""
LEAST_SILENCE_S = 10.0
"""Least seconds of silence after which a runtime hangs: on a busy machine it may wait for a processor."""
_SILENT_HEARTBEATS = 3
LEAST_LEASE_S = 3.0
"""Peers send a heartbeat a second, and a busy machine may miss one or two."""
ClientTimeout = Annotated[
    float,
    typer.Option(
        min=LEAST_LEASE_S,
        help="Seconds after which a silent client, or controller, is lost though its machine answers. It may "
        "be stopped, or compute for long in C code.",
    ),
]


def command(program: str, function: Callable[..., None]) -> NoReturn:
    """Run a program with one command.

    An error that the user can have caused is one line on standard error and exit code 1.
    """
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    app.command()(function)
    warn_in_lines(program)
    run_app(program, app)


_WORDS = (
    ("Input should be a valid number, unable to parse string as a number", "it is no number"),
    (
        "Input should be a valid integer, unable to parse string as an integer",
        "it is no whole number",
    ),
    ("Input should be greater than or equal to", "it must be at least"),
    ("Input should be less than or equal to", "it must be at most"),
)
"""Words of the library that checks options, and the words that a user reads instead."""


def warn_in_lines(program: str) -> None:
    """Show each warning as a line, without a place in the code of `pw`."""
    warnings.formatwarning = lambda message, *_args, **_kinds: f"{program}: warning: {message}\n"


def run_app(program: str, app: typer.Typer) -> NoReturn:
    """Run the program `app` (see `command`)."""
    try:
        code: Any = app(prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        say = getattr(error, "format_message", error.__str__)
        words = say().replace("Value error, ", "").rstrip(".")
        for theirs, ours in _WORDS:
            words = words.replace(theirs, ours)
        context = getattr(error, "ctx", None)
        fail(program, f"{words}; see {context.command_path if context else program} --help")
        code = EXIT_ERROR
    except Error as error:
        fail(program, str(error))
        code = EXIT_ERROR
    sys.exit(code or EXIT_OK)


def check_log_level(level: str) -> None:
    """Raise BadParameter unless `level` is a log level."""
    if level not in LOG_LEVELS:
        raise typer.BadParameter(f"no log level {level!r}; there are {', '.join(LOG_LEVELS)}")


def size_of(text: str, option: str = "--device-memory") -> int | None:
    """Return the bytes of an option, None if it is not given. Raises BadParameter if it is no size."""
    if not text:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {error}") from error


def time_of(text: str, option: str) -> float:
    """Return the seconds of an option as 90s, 30m or 1h; 0 if it is not given. Raises BadParameter."""
    if not text:
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if seconds < LEAST_PERIOD_S:
        words = f"{option} {text!r} is no time; write it as 90s, 30m or 1h, {LEAST_PERIOD_S:g} s at least"
        raise typer.BadParameter(words)
    return seconds


def check_bind(bind: str, security: Security = CLOSED, ways: str = TWO_WAYS) -> None:
    """Raise BadParameter if `bind` is no endpoint, Error with `ways` if it is off the loopback and plain."""
    try:
        place, _ = parse_bind(bind)
    except ConnectionFailed as error:
        words = (
            f"cannot listen on {bind!r}; it looks like tcp://127.0.0.1:7777, or tcp://127.0.0.1:7000-7100 for "
            "the first free port of a range"
        )
        raise typer.BadParameter(words) from error
    if isinstance(place.address, tuple) and not (any(security) or _is_loopback(place.address[0])):
        raise Error(f"{bind} can be reached from other machines: {ways}")


def check_reachable(controller: str, bind: str) -> None:
    """Raise Error if a host of a cluster on several machines would listen only on its own machine."""
    if controller.startswith("tcp://") and bind.startswith("tcp://"):
        there, here = (endpoint[6:].rpartition(":")[0] for endpoint in (controller, bind))
        if _is_loopback(here) and not _is_loopback(there) and not _names_this_machine(controller):
            raise Error(
                f"the controller at {controller} is on another machine, but {bind} can be reached from "
                "this one only; give --bind tcp://ADDRESS:0 with an address of this machine"
            )


def _names_this_machine(endpoint: str) -> bool:
    """Whether an endpoint is of this machine, or cannot be looked up, which dialling it says."""
    try:
        return is_here(look_up(parse(endpoint)))
    except (ConnectionFailed, OSError):
        return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(endpoint: str) -> str:
    """Return the numeric address of a listening endpoint."""
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def check_private(address: str) -> None:
    """Raise BadParameter unless `--private-address` is empty or one numeric address."""
    try:
        fits = not address or not ipaddress.ip_address(address).is_unspecified
    except ValueError:
        fits = False
    if not fits:
        raise typer.BadParameter(f"--private-address {address!r} is not one numeric address")


class _JsonLines(logging.Formatter):
    """A JSON document a record: time with zone, level, logger, event, fields, and traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        written = {
            "time": datetime.fromtimestamp(record.created)
            .astimezone()
            .isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        written = getattr(record, FIELDS, {"event": record.getMessage()}) | written
        if record.exc_info:
            written["traceback"] = self.formatException(record.exc_info)
        return json.dumps(written, default=str)


def configure_logging(level: str, form: str = "") -> None:
    """One line a record on standard error: `time LEVEL logger: event key=value ...`, or JSON.

    Args:
        level: the lowest level.
        form: `text` or `json`, also for the processes that this one starts; by default that of PW_LOG_FORMAT.

    Raises:
        BadParameter: there is no such form.
    """
    form = form or os.environ.get(LOG_FORM, "text")
    if form not in ("text", "json"):
        raise typer.BadParameter(f"no log format {form!r}; there are text, json")
    if form == "json":
        os.environ[LOG_FORM] = form
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=LOG_FORMAT)
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setLevel(max(handler.level, root.level))
        if form == "json":
            handler.setFormatter(_JsonLines())
    root.setLevel(min(root.level, recent.level))
    root.addHandler(recent)
    logging.getLogger("jax").setLevel(logging.ERROR)


def fail(program: str, message: str) -> None:
    """Write the one line that says why the program ends."""
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)


LEFT_S = 2.0
"""Seconds that a process whose parent was killed waits for all others to leave their directory."""


def longest_silence_s(heartbeat_s: float) -> float:
    """Return how long a runtime may say nothing, in seconds, before it counts as hung."""
    return max(LEAST_SILENCE_S, _SILENT_HEARTBEATS * heartbeat_s)


class Daemon:
    """Runs an event loop until a signal, the parent's end, or `stop`.

    Args:
        loop: the event loop.
        parent_fd: the channel to the parent, which has started this process as a `Child`; -1 for none.
        kinds: the types of the messages that the parent sends.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, parent_fd: int, kinds: Any = None) -> None:
        self.loop = loop
        self.exit_code = EXIT_OK
        self._stopped = False
        self.parent = Channel[Any](parent_fd, kinds, np.empty) if parent_fd >= 0 else None
        self.heard: Callable[[Any, list[Any]], None] = lambda message, arrays: None
        """Takes the messages of the parent, with their arrays."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if self.parent is not None:
            loop.add_reader(self.parent.fileno(), self._hear, self.parent)

    def announce(self, announcement: Announcement) -> bool:
        """Tell the parent; return whether there is one."""
        if self.parent is not None:
            with contextlib.suppress(OSError):  # it has ended
                self.parent.send(announcement)
        return self.parent is not None

    def _hear(self, parent: Channel[Any]) -> None:
        for message, arrays, _ in parent.arrived():
            self.heard(message, arrays)
        if parent.ended:
            self.loop.remove_reader(parent.fileno())
            self.stop()

    def stop(self, exit_code: int = EXIT_OK) -> None:
        """End the loop with the exit code of the first call."""
        if not self._stopped:
            self._stopped = True
            self.exit_code = exit_code
            self.loop.stop()

    def begin(self, work: Callable[[], T]) -> T:
        """Do what may take long before `run`, in another thread, and hear signals and the parent meanwhile.

        Raises what `work` raises, and SystemExit if this process has to end before it has returned.
        """
        done: Future[T] = Future()

        def act() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised below
                done.set_exception(error)
            self.loop.call_soon_threadsafe(self.loop.stop)

        threading.Thread(target=act, name="pw-begin", daemon=True).start()
        self.loop.run_forever()
        if not done.done():
            raise SystemExit(self.exit_code)
        return done.result()

    def leave(self, folder: PrivateFolder) -> None:
        """Leave the directory of a cluster."""
        was_left = self.parent is not None and self.parent.ended
        folder.leave(patience_s=LEFT_S if was_left else 0.0)

    def run(self, teardown: Callable[[], None]) -> int:
        """Run until stopped, tear down, and return the exit code."""
        # The garbage collector need not visit a hundred thousand objects of libraries, which takes tens of
        # milliseconds.
        gc.freeze()
        gc.set_threshold(GC_ALLOCATIONS)
        try:
            if not self._stopped:
                self.loop.run_forever()
        finally:
            teardown()
        return self.exit_code
