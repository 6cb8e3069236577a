"""The programs that are installed on a host."""

from __future__ import annotations

from functools import partial

from pw.core.actors.actor import Env
from pw.core.errors import CompileError, ErrorReport, PythonRefused
from pw.core.ids import Address
from pw.core.messages import Install, Installed
from pw.devices.host.backend import Backend
from pw.devices.host.launch_order import LaunchOrder
from pw.devices.host.program import HostProgram


class Installs(dict[int, HostProgram]):
    """Has the backend compile programs, and keeps them by their numbers."""

    def __init__(
        self, env: Env, backend: Backend, order: LaunchOrder, python_tenants: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self._env = env
        self._backend = backend
        self._order = order
        self._python_tenants = python_tenants

    def install(self, sender: Address, message: Install) -> None:
        """Compile a program, and answer when all its computations are compiled or one has failed."""
        body, plan = message.body.value(), message.plan.value()
        began_s = self._env.now_s()
        program = HostProgram.of(message.program, message.install, body, plan)
        program.tenant = message.tenant
        earlier = self.get(message.program)
        if earlier is not None:
            program.superseded = earlier.compiled
        self[message.program] = program
        blobs = {artifact.digest: artifact.blob for artifact in message.artifacts}
        waiting = {key for key in program.keys if key is not None}
        failures: list[ErrorReport] = []
        temporary: dict[bytes | None, int] = {}

        def answer() -> None:
            sizes = tuple([temporary.get(key, 0) for key in program.keys]) if temporary else ()
            error = failures[0] if failures else None
            compile_s = self._env.now_s() - began_s
            installed = Installed(
                message.epoch, message.program, error, sizes, message.install, compile_s
            )
            self._env.send(sender, installed)

        def compiled(key: bytes, result: ErrorReport | int | None) -> None:
            waiting.discard(key)
            if isinstance(result, ErrorReport):
                failures.append(result)
            elif result:
                temporary[key] = result
            if not waiting:
                answer()

        if not waiting:
            answer()
        for key, computation in zip(program.keys, body.computations, strict=True):
            if key is None:
                continue
            tenants = self._python_tenants
            if computation.traits.runs_on_host and tenants and message.tenant not in tenants:
                refused = PythonRefused(
                    f"{computation.name!r} is a Python function of tenant {message.tenant!r}, and this host "
                    f"runs those of {', '.join(tenants)} only; its owner can change that with pw-worker "
                    "--python-tenants"
                )
                compiled(key, ErrorReport.of(refused, self._order.host))
                continue
            blob = blobs.get(computation.artifact) if computation.traits.has_artifact else b""
            if blob is None:
                missing = CompileError(
                    f"the code of {computation.name!r} has not reached this host; make the pw.jit function anew"
                )
                compiled(key, ErrorReport.of(missing, self._order.host))
                continue
            devices = program.at(computation.placement)
            self._backend.install(key, computation, blob, devices, partial(compiled, key))
