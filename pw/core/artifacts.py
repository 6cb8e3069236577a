"""Artifacts that are known, for who sends each of them only once: for as long as a program consists of it."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

from pw.core.messages import Artifact
from pw.core.program import Program


class Artifacts(WeakValueDictionary[bytes, Artifact]):
    """Artifacts by digest; whoever keeps a program keeps those that it consists of."""

    def of(self, body: Program, sent: Iterable[Artifact]) -> tuple[Artifact, ...]:
        """What a program consists of, as far as it was sent with it or before; equal ones are there once."""
        new = {artifact.digest: self.setdefault(artifact.digest, artifact) for artifact in sent}
        needed = sorted({computation.artifact for computation in body.computations})
        found = [new.get(digest) or self.get(digest) for digest in needed]
        return tuple(artifact for artifact in found if artifact is not None)
