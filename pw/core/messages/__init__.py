"""The whole protocol: every message between actors.

Each message is a frozen struct that travels as a tagged msgpack array. Its base says which processes
may send it to which actor (`base`), the types of its fields what they may hold (`bounds`); a frame
with anything else does not decode. Its docstring names the actors, and says what the message
promises. A message marked *local* never leaves the controller process. Tags are part of the protocol:
append, never reuse, and raise `PROTOCOL_VERSION` when the meaning of an old tag changes.

Other modules import all messages from this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from pw.core.messages.base import *
from pw.core.messages.clients import *
from pw.core.messages.compiling import *
from pw.core.messages.device_tests import *
from pw.core.messages.edges import *
from pw.core.messages.files import *
from pw.core.messages.gangs import *
from pw.core.messages.islands import *
from pw.core.messages.leases import *
from pw.core.messages.links import *
from pw.core.messages.memory import *
from pw.core.messages.names import *
from pw.core.messages.observing import *
from pw.core.messages.pace import *
from pw.core.messages.plans import *
from pw.core.messages.reports import *
from pw.core.messages.status import *
from pw.core.messages.stores import *
from pw.core.messages.suspending import *
from pw.core.messages.timelines import *
from pw.core.messages.trees import *
from pw.core.messages.waiting import *

REMOTE: tuple[type[Base], ...] = tuple(
    [
        kind
        for kind in list(vars().values())
        if isinstance(kind, type) and issubclass(kind, Base) and not issubclass(kind, Local)
        if isinstance(kind.__struct_config__.tag, int)
    ]
)
"""Messages that may arrive from another process: the bases of routes have no number as their tag."""

if TYPE_CHECKING:
    Message = Base
else:
    Message = Union[REMOTE]  # noqa: UP007 - of a tuple
