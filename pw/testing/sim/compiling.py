"""A simulated user asks hosts about a module, and checks the answer."""

from __future__ import annotations

from typing import Any

from pw.client.session.thread_messages import AskCompiler
from pw.core.errors import CompileError
from pw.core.messages import Detail
from pw.core.programs.stablehlo import Stablehlo, encode
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing.sim.digests import DOES_NOT_COMPILE
from pw.testing.sim.life import Life
from pw.testing.sim.oracle import INFRASTRUCTURE
from pw.testing.sim.world import Violation


def ask_compiler(user: Life) -> None:
    """Ask the hosts of some devices about a module, with or without a program to follow."""
    bound = user.random.choice(list(user.slices.values()))
    devices = tuple(range(user.random.randint(1, len(bound.devices))))
    broken = user.random.random() < 0.1
    module = (DOES_NOT_COMPILE if broken else b"") + user.random.randbytes(4)
    spec = ArraySpec((), "bool", Sharding((), ()), Placement(bound.slice, devices))

    def compiled(answer: Any, error: BaseException | None) -> None:
        user.world.checked["oracle"] += 1
        kind = type(error).__name__
        if error is None and not broken and answer.facts.name == module.hex():
            return
        if broken and isinstance(error, CompileError):
            return
        if user.world.ledger.any and (kind in INFRASTRUCTURE or user.session.closed is not None):
            return
        if bound.slice not in user.slices and kind in INFRASTRUCTURE:
            return
        outcome = error if answer is None else answer
        raise Violation("oracle", f"{user.name}: {module!r} was compiled: {outcome!r}")

    promise = user._promise(f"compile {module.hex()}", compiled)
    user._post(AskCompiler(encode(Stablehlo(module, b"")), spec, Detail.FACTS, promise))
