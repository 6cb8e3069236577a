"""The messages that wait at a node: its own first, then those of its peers, fairly.

Each peer has a queue, and peers are in groups: a group has a share of the node's time, and its
peers have equal shares of messages. The order between groups is that of FQ-CoDel (RFC 8290,
section 4.2, without its management of queues), with seconds of work instead of bytes. A group may
use its credit, then it goes behind all others and gets new credit. A group that had nothing to say
goes before those that always have. So a peer that sends one message waits for the message that is
being handled, however many another peer has sent.

What one peer sends stays in order, and so do the node's own messages. A node handles all of its own
that are there before it takes the next of a peer.

Where only one peer has messages, they go among the node's own without a choice: the first `FEW`
when they come, and later ones some at a time, fewer if they take long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pw.core.ids import Address
from pw.core.messages.roles import Role, role_of

CREDIT_S = 200e-6
"""Seconds for which the messages of a group are handled before those of the next."""
WORKERS_CREDIT_S = 1e-3
"""Seconds of credit for a host and for the controller: the work of all clients depends on them."""
TURN_S = 0.5e-3
"""Seconds after which a turn of a node takes no more messages of peers."""
HELD_MESSAGES = 256
"""Waiting messages of one peer at which reading from it stops."""
FEW = 2
"""Number of messages of peers, if no others wait, that are put among a node's own at once."""
_QUOTA = 8
QUEUES_KEPT = 1024
"""Number of queues above which those without messages are dropped."""

Entry = tuple[str, Address | None, object]
"""Name of an actor, the sender if it is not the actor, and a message."""

EVERY = ""
"""Name in the place of an actor's: the message is for all of them."""


def group_of(node: str) -> str:
    """The group of a node: each is one of its own."""
    return node


def credit_of(node: str) -> float:
    """The credit of the group of a node, in seconds."""
    return CREDIT_S if role_of(node) is Role.CLIENT else WORKERS_CREDIT_S


class _Group:
    """Queues that share a credit; only those with messages are here."""

    __slots__ = ("credit_s", "is_listed", "most_s", "queues")

    def __init__(self, most_s: float) -> None:
        self.queues: deque[_PeerQueue] = deque()
        self.most_s = most_s
        self.credit_s = most_s
        self.is_listed = False


class _PeerQueue(deque[Entry]):
    """The messages of one peer."""

    __slots__ = ("group", "node", "room")

    def __init__(self, node: str, group: _Group) -> None:
        super().__init__()
        self.node = node
        self.group = group
        self.room = -1
        """Length at which the peer is read again; -1 while it is read."""


class Mailbox:
    """The messages that wait at one node.

    Args:
        group_of: returns the group of a node; it is asked when the node sends its first message.
    """

    def __init__(self, group_of: Callable[[str], str] = group_of) -> None:
        self.own: deque[Entry] = deque()
        """Messages of the node itself, timers among them; those that are there go before `take`."""
        self.waiting = 0
        """Number of waiting messages of peers."""
        self.to_resume: list[str] = []
        """Peers whose reading had stopped and who have room again; the node tells its network."""
        self._group_of = group_of
        self.queues: dict[str, _PeerQueue] = {}
        """Messages of each peer; the empty ones are dropped when there are many (`QUEUES_KEPT`)."""
        self.groups: dict[str, _Group] = {}
        """Groups of these peers."""
        self._fresh: deque[_Group] = deque()
        self._old: deque[_Group] = deque()
        self.at_work: _Group | None = None
        """Group of the last message of `take`, until `end`."""
        self._since_s = 0.0
        self._quota = 1
        self._kept = QUEUES_KEPT

    def __len__(self) -> int:
        return len(self.own) + self.waiting

    def deliver(self, node: str, entry: Entry) -> None:
        """Put a message of a peer behind its others (see `FEW`)."""
        queue = self.queues.get(node)
        if queue is None:
            queue = self._open(node)
        self.waiting += 1
        if not queue:
            group = queue.group
            group.queues.append(queue)
            if not group.is_listed:
                group.is_listed = True
                group.credit_s = group.most_s
                self._fresh.append(group)
        queue.append(entry)

    def take(self, now_s: float) -> Entry | None:
        """The next message of a peer; None without one. Some more of it may be added to `own`.

        The time since the last call is charged to the group of the message that it returned.
        """
        last = self.at_work
        if last is not None:
            spent_s = now_s - self._since_s
            last.credit_s -= spent_s
            self._quota = 1 if spent_s > CREDIT_S else min(2 * self._quota, _QUOTA)
        self._since_s = now_s
        if not self.waiting:
            self.at_work = None
            return None
        groups = self._fresh or self._old
        group = groups[0]
        if group.credit_s <= 0.0 or not group.queues:
            group = self._next()
        self.at_work = group
        queues = group.queues
        queue = queues[0]
        entry = queue.popleft()
        if len(queue) + 1 == self.waiting:  # no others wait
            for _ in range(min(self._quota - 1, len(queue))):
                self.own.append(queue.popleft())
            self.waiting = len(queue)
        else:
            self.waiting -= 1
        if not queue:
            queues.popleft()
        elif len(queues) > 1:
            queues.rotate(-1)
        if len(queue) <= queue.room:
            queue.room = -1
            self.to_resume.append(queue.node)
        return entry

    def end(self, now_s: float) -> None:
        """Charge the peer of the last message; later work of this turn is charged to no peer."""
        if self.at_work is not None:
            self.at_work.credit_s -= now_s - self._since_s
            self.at_work = None

    def holds(self, node: str, most: int) -> bool:
        """Return whether more than `most` messages of a peer wait; then reading stops until `to_resume` has the
        peer.
        """
        queue = self.queues.get(node)
        if queue is None or len(queue) <= most:
            return False
        queue.room = most // 2
        return True

    def clear(self) -> None:
        """Drop all messages."""
        self.own.clear()
        self.waiting = 0
        self.at_work = None
        for held in (self.queues, self.groups, self._fresh, self._old, self.to_resume):
            held.clear()

    def _next(self) -> _Group:
        """The group whose turn it is, which has a message."""
        while True:
            groups = self._fresh or self._old
            group = groups[0]
            if not group.queues:
                groups.popleft()
                if groups is self._fresh:  # or it would gain by falling silent for a moment
                    self._old.append(group)
                else:
                    group.is_listed = False
            elif group.credit_s > 0.0:
                return group
            elif len(self._fresh) + len(self._old) == 1:
                group.credit_s = group.most_s
            else:
                # A long message costs as many rounds as it was long, but not for ever.
                group.credit_s = max(group.credit_s, -16 * group.most_s) + group.most_s
                self._old.append(groups.popleft())

    def _open(self, node: str) -> _PeerQueue:
        if len(self.queues) >= self._kept:
            self.queues = {name: queue for name, queue in self.queues.items() if queue}
            self.groups = {self._group_of(name): q.group for name, q in self.queues.items()}
            self._kept = max(QUEUES_KEPT, 2 * len(self.queues))
        name = self._group_of(node)
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = _Group(credit_of(node))
        queue = self.queues[node] = _PeerQueue(node, group)
        return queue
