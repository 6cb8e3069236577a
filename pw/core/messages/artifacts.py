"""The artifacts that a process knows, so that each is sent once; kept as long as a program needs them."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

from pw.core.messages import Artifact
from pw.core.programs.program import Program


class Artifacts(WeakValueDictionary[bytes, Artifact]):
    """Artifacts by digest, as long as a registered program refers to them."""

    def of(self, body: Program, sent: Iterable[Artifact]) -> tuple[Artifact, ...]:
        """Return the artifacts of a program, which were sent with it or before; equal ones are one object."""
        new = {artifact.digest: self.setdefault(artifact.digest, artifact) for artifact in sent}
        needed = sorted(set(body.artifacts()))
        artifacts = [new.get(digest) or self.get(digest) for digest in needed]
        return tuple(artifact for artifact in artifacts if artifact is not None)
