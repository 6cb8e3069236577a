"""Rights: the bounds of what the clients of a tenant may have together, and of what they may do.

A field of `Rights` defines a right: its name in the file of `pw-controller --tenants`, its type, its default,
its unit, and what it bounds. The parser, the table in docs/tenants.md and the checks read it there. A right
that is named after a `Resource` is checked by the ledger (`pw.sched.control.usage`).

The file is TOML. `[tenants.NAME]` has the rights of a tenant, `[default]` those of tenants without a section:

    [default]
    devices = 8

    [tenants.research]
    share = 2
    devices = 64
    may_drain = true
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import msgspec

from pw.core.errors import ArgumentError, QuotaExceeded
from pw.core.sizes import parse_size, size_in_words
from pw.core.tenants import OPERATOR


class Resource(StrEnum):
    """Kind of what the ledger counts, named as the right that bounds it."""

    CLIENTS = "clients"
    DEVICES = "devices"
    PROGRAMS = "programs"
    HOST_MEMORY = "host_memory"
    DISK = "disk"
    NAMES = "names"


class Size(int):
    """Number of bytes, which the file may have as `4GiB`."""


Weight = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Amount = Annotated[int, msgspec.Meta(ge=0)]


def _right(unit: str, form: str, meaning: str) -> msgspec.Meta:
    """Describe a right: its unit, the form of its values in words, and what it bounds."""
    return msgspec.Meta(description=meaning, extra={"unit": unit, "form": form})


_WEIGHT = "a positive number"
_COUNT = "a whole number, 0 or more"
_FLAG = "true or false"
_SIZE = "a size such as 4GiB"
DEVICE_MEMORY = "device_memory"
"""Name of the right that the schedulers of islands check, device by device, and not the ledger."""


class Rights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rights of one tenant; None for no bound."""

    share: Annotated[
        Weight, _right("weight", _WEIGHT, "its part of devices under `--policy share`")
    ] = 1.0
    max_share: Annotated[
        Weight | None, _right("weight", _WEIGHT, "share that one client may ask for")
    ] = None
    max_priority: Annotated[
        Amount | None, _right("priority", _COUNT, "priority that one client may ask for")
    ] = None
    clients: Annotated[
        Amount | None, _right("clients", _COUNT, "processes that are connected at once")
    ] = None
    devices: Annotated[
        Amount | None, _right("devices", _COUNT, "virtual devices of all its slices")
    ] = None
    programs: Annotated[
        Amount | None, _right("programs", _COUNT, "compiled programs that its clients hold")
    ] = None
    host_memory: Annotated[
        Size | None, _right("bytes", _SIZE, "replicas of `pw.checkpoint` in host memory")
    ] = None
    disk: Annotated[
        Size | None,
        _right("bytes", _SIZE, "arrays in the checkpoints on disk that its clients write"),
    ] = None
    device_memory: Annotated[
        Size | None, _right("bytes", _SIZE, "memory of each device that its arrays and runs take")
    ] = None
    names: Annotated[Amount | None, _right("names", _COUNT, "arrays that it publishes by name")] = (
        None
    )
    python: Annotated[
        bool | tuple[str, ...],
        _right("hosts", "true, false or a list of hosts", "hosts that run its Python functions"),
    ] = True
    may_drain: Annotated[
        bool,
        _right(
            "", _FLAG, "drains hosts (`pw drain`), and has devices tested (`pw doctor --devices`)"
        ),
    ] = False
    may_publish_to_all: Annotated[
        bool, _right("", _FLAG, 'lets each tenant read what it publishes (`to="all"`)')
    ] = True
    may_cancel: Annotated[
        bool, _right("", _FLAG, "cancels the runs of other tenants (`pw cancel`)")
    ] = False
    preemptible: Annotated[
        bool,
        _right("", _FLAG, "work of a higher priority may suspend its clients (`--preempt-after`)"),
    ] = False
    may_suspend: Annotated[
        bool, _right("", _FLAG, "suspends and resumes clients of other tenants (`pw suspend`)")
    ] = False

    def bound(self, resource: Resource) -> int | None:
        """Return how much the tenant may have of a resource; None for any amount."""
        bound: int | None = getattr(self, resource)
        return bound

    def bounds(self) -> dict[str, int]:
        """Return the bounds of device memory and of all resources that have one, by name."""
        bounds = {resource.value: self.bound(resource) for resource in Resource}
        bounds[DEVICE_MEMORY] = self.device_memory
        return {name: int(bound) for name, bound in bounds.items() if bound is not None}

    def check(self, share: float, priority: int) -> None:
        """Raise QuotaExceeded if a client of the tenant may not ask for this share, or this priority."""
        for name, asked, bound in (
            ("share", share, self.max_share),
            ("priority", priority, self.max_priority),
        ):
            if bound is not None and asked > bound:
                raise QuotaExceeded(
                    f"{name}={asked:g} is more than a client may have in this cluster; connect with "
                    f"{name}={bound:g} or less (pw-controller --max-{name}, or max_{name} of its --tenants)"
                )

    def bounded(self, share: float, priority: int) -> tuple[float, int]:
        """Return the share and the priority, or the bounds where they are above."""
        return (
            share if self.max_share is None else min(share, self.max_share),
            priority if self.max_priority is None else min(priority, self.max_priority),
        )

    def runs_python_on(self, host: str) -> bool:
        """Whether Python functions of the tenant may run on a host."""
        return self.python if isinstance(self.python, bool) else host in self.python

    def python_in_words(self) -> str:
        """Return where Python functions of the tenant run, for an error."""
        hosts = ", ".join(self.python) if isinstance(self.python, tuple) else ""
        there = f"it runs them on {hosts}" if hosts else "it may run none in this cluster"
        return f"{there} (python in pw-controller --tenants)"


def in_words(resource: Resource, amount: int) -> str:
    """Return an amount of a resource as people write it, as in `1 device` or `4.00 GiB of host memory`."""
    if resource is Resource.HOST_MEMORY:
        return f"{size_in_words(amount)} of host memory"
    if resource is Resource.DISK:
        return f"{size_in_words(amount)} on disk"
    return f"{amount} {resource.value[:-1] if amount == 1 else resource.value}"


@dataclass(frozen=True, slots=True)
class Definition:
    """A right, for those that write about it."""

    name: str
    unit: str
    form: str
    """Words for its values in the file."""
    meaning: str
    default: object


def definitions() -> Iterator[Definition]:
    """Yield all rights, in the order of the table in the documents."""
    hints = get_type_hints(Rights, include_extras=True)
    for one in msgspec.structs.fields(Rights):
        meta = hints[one.name].__metadata__[-1]
        yield Definition(
            one.name, meta.extra["unit"], meta.extra["form"], meta.description, one.default
        )


_FORMS = {one.name: one.form for one in definitions()}


@dataclass(frozen=True, slots=True)
class TenantRights:
    """The rights of all tenants.

    The tenant `operator` always may drain, cancel and suspend. `default` is not for it: it has only the bounds
    that its own section has.
    """

    default: Rights = field(default_factory=Rights)
    """Rights of tenants that have none of their own."""
    named: Mapping[str, Rights] = field(default_factory=dict)
    """Rights of each tenant that has its own, by name."""
    have_file: bool = False
    """True if a file gives them, which the operator may change while the controller runs. Then schedulers count
    the memory of each tenant."""

    def of(self, tenant: str) -> Rights:
        """Return the rights of a tenant."""
        if tenant != OPERATOR:
            return self.named.get(tenant, self.default)
        own = self.named.get(OPERATOR, Rights())
        return msgspec.structs.replace(own, may_drain=True, may_cancel=True, may_suspend=True)

    def all(self) -> tuple[Rights, ...]:
        """Return the rights of every tenant that has its own, and those of the rest."""
        return (self.default, *self.named.values())

    def bounds_python_on(self, host: str) -> bool:
        """Whether the rights of a tenant name this host as one that runs its Python functions."""
        return any(isinstance(one.python, tuple) and host in one.python for one in self.all())


@dataclass(frozen=True, slots=True)
class NewRights:
    """Note of the controller's process to the controller: the operator has changed the rights of tenants."""

    rights: TenantRights


NO_BOUNDS = TenantRights()
"""Rights of tenants that share devices equally, and have no bounds."""


def rights_of_options(
    max_share: float | None = None,
    max_priority: int | None = None,
    shares: Mapping[str, float] = {},
    text: str | None = None,
    file: str = "",
) -> TenantRights:
    """Return the rights of all tenants from the options of a controller.

    Args:
        max_share: the largest share of a client of any tenant; None for any.
        max_priority: the highest priority of a client of any tenant; None for any.
        shares: shares of tenants.
        text: the text of a file of rights; None without a file.
        file: name of the file, for errors.

    Raises:
        ArgumentError: the file is wrong, or a right is given by an option and in the file.
    """
    all_have: dict[str, Any] = {"max_share": max_share, "max_priority": max_priority}
    options = [name for name, bound in all_have.items() if bound is not None]
    options += ["share"] * bool(shares)
    written = {} if text is None else _sections(text, file)
    for section, rights in written.items():
        for name in options:
            if name in rights:
                option = "tenant-shares" if name == "share" else name.replace("_", "-")
                raise _wrong(
                    *(text or "", file, section, name),
                    f"{name} is given here and by --{option}; leave one out",
                )
    rows = {section: _converted(text or "", file, section, row) for section, row in written.items()}
    everywhere = {name: all_have[name] for name in options if name in all_have}
    rows = {section: msgspec.structs.replace(row, **everywhere) for section, row in rows.items()}
    default = rows.pop(_DEFAULT, Rights(**everywhere))
    named = {name: row for (_, name), row in rows.items()}
    named.setdefault(OPERATOR, Rights(**everywhere))
    for tenant, share in shares.items():
        named[tenant] = msgspec.structs.replace(named.get(tenant, default), share=share)
    return TenantRights(default, named, have_file=text is not None)


# --- the file -------------------------------------------------------------------------------------

Section = tuple[str, ...]
"""Names in the head of a section of the file."""

_DEFAULT: Section = ("default",)
_HEAD = re.compile(r"\s*\[{1,2}([^\[\]]+)\]{1,2}\s*(#.*)?")


def _sections(text: str, file: str) -> dict[Section, dict[str, Any]]:
    """Return the sections of a file. Raises ArgumentError if it is no TOML, or has other sections."""
    try:
        tables = tomllib.loads(f"{text}\n")
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{file}: {error}") from None
    sections: dict[Section, dict[str, Any]] = {}
    for name, table in tables.items():
        if name not in ("default", "tenants") or not isinstance(table, dict):
            words = f"{name!r} is no section; there are [default] and [tenants.NAME]"
            raise _wrong(text, file, (), name, words)
        if name == "default":
            sections[_DEFAULT] = table
            continue
        for tenant, row in table.items():
            if not isinstance(row, dict):
                words = f"{tenant!r} is no section; write rights below [tenants.NAME]"
                raise _wrong(text, file, ("tenants",), tenant, words)
            sections["tenants", tenant] = row
    return sections


def _converted(text: str, file: str, section: Section, row: Mapping[str, Any]) -> Rights:
    for name, value in row.items():
        if name not in _FORMS:
            words = f"{name!r} is no right; there are {', '.join(_FORMS)}"
            raise _wrong(text, file, section, name, words)
        if section == ("tenants", OPERATOR) and name.startswith("may_"):
            words = f"the tenant {OPERATOR!r} may do all; leave {name} out"
            raise _wrong(text, file, section, name, words)
        try:
            msgspec.convert({name: value}, Rights, dec_hook=_size)
        except msgspec.ValidationError:
            words = f"{name} = {value!r} is not {_FORMS[name]}"
            raise _wrong(text, file, section, name, words) from None
    return msgspec.convert(row, Rights, dec_hook=_size)


def _size(right: type, value: object) -> object:
    """Return the bytes of a size in the file. Raises ValueError if it is none."""
    if right is not Size or isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("it is no size")
    return Size(parse_size(str(value)))


def _wrong(text: str, file: str, section: Section, name: str, words: str) -> ArgumentError:
    """Return the error of a right or a section in the file, with its line."""
    return ArgumentError(f"{file}, line {_line_of(text, (*section, name))}: {words}")


def _line_of(text: str, path: Section) -> int:
    """Return the line of the head or the key at a path, or of the first below it; else of its section, or 1."""
    here: Section = ()
    head = 1
    for number, line in enumerate(text.splitlines(), 1):
        if match := _HEAD.fullmatch(line):
            at = here = tuple(_path(match[1]))
            head = number if here == path[:-1] else head
        else:
            key, equals, _ = line.partition("=")
            at = (*here, *_path(key)) if equals else ()
        if at[: len(path)] == path:
            return number
    return head


def _path(head: str) -> Iterator[str]:
    """Yield the names in a head or a dotted key; none of a text that is neither."""
    try:
        table: Any = tomllib.loads(f"[{head}]")
    except tomllib.TOMLDecodeError:
        return
    while table:
        ((name, table),) = table.items()
        yield name
