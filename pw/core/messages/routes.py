"""Which role may send which message to which actor, checked before a handler runs.

An actor need not ask whether a message may come from such a process at all; it asks only whose the
things are that the message names.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from pw.core.messages import REMOTE
from pw.core.messages.base import Base
from pw.core.messages.roles import Role, role_of

_NAMES_KEPT = 1 << 14

_PERMITTED: defaultdict[tuple[Role, str], set[type]] = defaultdict(set)
for _kind in REMOTE:
    for _base in _kind.__mro__:
        if issubclass(_base, Base):
            for _role in _base.senders:
                _PERMITTED[_role, _base.receiver].add(_kind)


@lru_cache(maxsize=_NAMES_KEPT)
def _permitted(node: str, actor: str) -> set[type]:
    return _PERMITTED.get((role_of(node), actor.partition("/")[0]), set())


def permits(node: str, actor: str, kind: type) -> bool:
    """Whether the node may send a message of this kind to an actor of this name on another node."""
    return kind in _permitted(node, actor)
