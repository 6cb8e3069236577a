"""`pw.names()`: what is published, as an object and as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pw.client.connection import current
from pw.client.display.tables import Shown, Table
from pw.client.keywords import checks_keywords
from pw.core.messages import NameInfo, NameList
from pw.core.sizes import size_in_words
from pw.core.waits import LOOKING_S

__all__ = ["ClusterNames", "NameInfo", "names"]


@dataclass(frozen=True, slots=True, repr=False)
class ClusterNames(Shown):
    """The names that this session may look up; prints as a table."""

    names: tuple[NameInfo, ...]

    @classmethod
    def of(cls, reply: NameList) -> ClusterNames:
        """Return the controller's answer."""
        return cls(tuple(sorted(reply.names, key=lambda one: (one.tenant, one.name))))

    def __getitem__(self, name: str) -> NameInfo:
        for one in self.names:
            if name in (one.name, f"{one.tenant}/{one.name}"):
                return one
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return any(name in (one.name, f"{one.tenant}/{one.name}") for one in self.names)

    @property
    def head(self) -> str:
        """One line about all names."""
        held = sum(one.size_bytes for one in self.names)
        count = len(self.names)
        return f"{count} name{'' if count == 1 else 's'}, {size_in_words(held)} published"

    def tables(self) -> tuple[Table, ...]:
        """Return the table of names."""
        rows = [
            (
                one.name,
                one.tenant,
                one.version,
                ", ".join(map(str, one.versions)),
                one.arrays,
                size_in_words(one.size_bytes),
                one.readers,
                one.maker or "(has left)",
                _keep(one.keep_s),
                ", ".join(one.to),
            )
            for one in self.names
        ]
        columns = ("name", "tenant", "version", "versions", "arrays", "bytes", "readers")
        return (Table("Names", (*columns, "publisher", "kept", "also for"), tuple(rows)),)


def _keep(keep_s: float) -> str:
    return "" if not keep_s else "for good" if keep_s == math.inf else f"{keep_s:g} s"


@checks_keywords
def names(timeout_s: float = LOOKING_S) -> ClusterNames:
    """Return the names that this session may look up, with their versions, bytes and readers.

    In a terminal the result prints as a table, in a notebook it shows as such; a script reads its attributes,
    as in `pw.names()["base"].readers`. All sizes are in bytes, of one copy.

    Args:
        timeout_s: how long to wait for the controller's answer, in seconds.

    Raises:
        ConnectionFailed: the controller has not answered within `timeout_s`, or is gone for good.
    """
    return ClusterNames.of(current.runtime().ask.names(timeout_s))
