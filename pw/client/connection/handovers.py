"""Arrays that one session hands to another of the same cluster, in place (`pw.sched.control.handovers`)."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence

from pw.core.errors import ErrorReport
from pw.core.messages import OFFER_TOKEN_BYTES, CreateArray, Offer, OfferSource
from pw.core.sharding import ArraySpec


class Handovers:
    """Offers and takes arrays; from any thread.

    Args:
        lock: held while a message gets its number and is posted, so that numbers go up.
        ids: returns so many new ids.
        tell: sends a message to the controller.
    """

    def __init__(
        self,
        lock: contextlib.AbstractContextManager[object],
        ids: Callable[[int], Sequence[int]],
        tell: Callable[[object], None],
    ) -> None:
        self._lock = lock
        self._ids = ids
        self._tell = tell

    def offer(self, arrays: Sequence[tuple[int, ArraySpec]], token: bytes = b"") -> bytes:
        """Let another session take these arrays, all of one slice; returns the token with which it does.

        They may be deleted and donated afterwards. An offer that no session takes ends after a minute; until
        then a call that donates one of the arrays waits.
        """
        token = token or secrets.token_bytes(OFFER_TOKEN_BYTES)
        with self._lock:
            (number,) = self._ids(1)
            ids, specs = tuple([one for one, _ in arrays]), tuple([spec for _, spec in arrays])
            self._tell(Offer(number, token, ids, specs))
        return token

    def offers(self, groups: Sequence[Sequence[tuple[int, ArraySpec]]]) -> tuple[Offer, ...]:
        """Return an offer for each group of arrays, for a message that has them all."""
        offers = []
        for number, group in zip(self._ids(len(groups)), groups, strict=True):
            ids, specs = tuple([one for one, _ in group]), tuple([spec for _, spec in group])
            offers.append(Offer(number, secrets.token_bytes(OFFER_TOKEN_BYTES), ids, specs))
        return tuple(offers)

    def refuse(self, token: bytes, error: ErrorReport) -> None:
        """Fail the arrays that another session takes with this token: they cannot be offered."""
        with self._lock:
            (number,) = self._ids(1)
            self._tell(Offer(number, token, (), (), error))

    def take(self, token: bytes, specs: Sequence[ArraySpec]) -> list[int]:
        """Take all arrays of an offer, before or after it is made; returns their ids here at once.

        Args:
            token: token of the offer; or 16 new random bytes, with which the other session then offers.
            specs: for each offered array its spec here: other meshes and shapes name the same shards, on the
                same physical devices (see `allocate_slice(like=...)`).

        The arrays fail with ArrayLost if there is no such offer within a minute, and with PlacementError or
        ShardingError if a spec does not fit.
        """
        with self._lock:
            ids = list(self._ids(len(specs)))
            for index, (number, spec) in enumerate(zip(ids, specs, strict=True)):
                self._tell(CreateArray(number, spec, source=OfferSource(token, index)))
        return ids
