"""The programs that a session has registered, and what no message can hold."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from pw.core.compact import Compact
from pw.core.errors import ArgumentError
from pw.core.messages import INLINE_BYTES, Artifact, RegisterProgram
from pw.core.programs.program import Program
from pw.transport.links import codec

MANY_ARGUMENTS = codec.MAX_FRAME_BYTES // 2 // INLINE_BYTES
"""Arguments of a call that fit into a message, whatever their sizes."""


class Programs:
    """Registered programs and their artifacts; every method but `release` needs the session's lock."""

    def __init__(self) -> None:
        self.artifacts: Counter[bytes] = Counter()
        """Number of programs that need each artifact; the controller keeps an artifact as long."""
        self._needs: dict[int, tuple[bytes, ...]] = {}
        self._bodies: dict[int, Compact[Program]] = {}
        self._with_effects: set[int] = set()
        self._released: deque[int] = deque()
        self.release = self._released.append
        """Takes a program to be released with the next tick; callable from `__del__`."""

    def __len__(self) -> int:
        return len(self._needs)

    def called(self, program: int) -> tuple[str, bool]:
        """Return a program's name, and whether it calls Python functions on hosts."""
        body = self._bodies.get(program)
        return "" if body is None else body.held.name, program in self._with_effects

    def of(self, number: int) -> Program:
        """Return a registered program."""
        return self._bodies[number].value()

    def unsent(self, artifacts: Mapping[bytes, bytes]) -> tuple[Artifact, ...]:
        """Return the artifacts that the controller does not have."""
        return tuple(Artifact(d, blob) for d, blob in artifacts.items() if d not in self.artifacts)

    def add(self, number: int, body: Compact[Program], artifacts: Mapping[bytes, bytes]) -> None:
        """Count a program that was registered."""
        if not body.held.is_repeatable:
            self._with_effects.add(number)
        self.artifacts.update(artifacts.keys())
        self._needs[number] = tuple(artifacts)
        self._bodies[number] = body

    def forget_released(self) -> Iterator[int]:
        """Forget the released programs, and yield their numbers."""
        while self._released:
            program = self._released.popleft()
            self._bodies.pop(program, None)
            self._with_effects.discard(program)
            for digest in self._needs.pop(program, ()):
                self.artifacts[digest] -= 1
                if not self.artifacts[digest]:
                    del self.artifacts[digest]
            yield program


def check_size(body: Compact[Program], artifacts: Mapping[bytes, bytes]) -> None:
    """Raise ArgumentError if a program and its artifacts do not fit into one message to a host."""
    program = body.held
    every = tuple(Artifact(digest, artifacts[digest]) for digest in artifacts)
    try:
        codec.encode_message(RegisterProgram(0, body, every))
    except codec.TooManyObjects as error:
        raise ArgumentError(
            f"the program {program.name!r} cannot be sent to the cluster: {error}. It takes "
            f"{len(program.inputs)} arrays and makes {len(program.outputs)}, with {len(program.nodes)} calls: "
            "stack similar arrays, or divide the function"
        ) from error
    except codec.MessageTooLarge as error:
        sizes = {artifact.digest: len(artifact.blob) for artifact in every}
        name, size_bytes = max(
            ((one.name, sizes.get(one.artifact, 0)) for one in program.computations),
            key=lambda pair: pair[1],
            default=("", 0),
        )
        raise ArgumentError(
            f"the program {program.name!r} cannot be sent to the cluster: {error}. Its largest "
            f"computation, {name!r}, takes {size_bytes} bytes; place large constants once with pw.put(x), "
            "and pass them as arguments"
        ) from error


def check_arguments(args: Sequence[int | bytes]) -> None:
    """Raise ArgumentError if the small host values of a call do not fit into one message."""
    size_bytes = sum(len(arg) for arg in args if isinstance(arg, bytes))
    limit_bytes = codec.MAX_FRAME_BYTES // 2
    if size_bytes > limit_bytes:
        raise ArgumentError(
            f"a call has {len(args)} arguments, and those that are small host values take {size_bytes} bytes "
            f"together, more than the {limit_bytes} that travel with one call: place them with pw.put first, "
            "or stack them"
        )
