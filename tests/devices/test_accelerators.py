"""What is different where devices are no CPU, on stand-ins: the machines that run this have no others."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.export
import jax.extend.backend
import pytest

import pw
from pw.cli import embedded
from pw.cli.host import HostRuntime
from pw.cli.host_options import HostOptions
from pw.core.errors import ErrorReport
from pw.core.messages import FormIsland, IslandJoined, IslandJoinFailed
from pw.devices.jax import compile as compiling
from pw.devices.jax import executables, group, making
from pw.processes.daemons import LocalDaemon, visible_gpus
from tests.devices.test_jax_backend import add_one, export, open_host, spec_of


class Gpu:
    """A CPU device that calls its platform what those of CUDA and of ROCm call theirs."""

    platform = "gpu"

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def test_what_is_embedded_compiles_for_the_platform_that_its_gpus_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pw.disconnect()
    monkeypatch.delenv("PW_ADDRESS", raising=False)
    backends = jax.extend.backend.backends() | {"cuda": SimpleNamespace(platform="gpu")}
    gpus = [Gpu(device) for device in jax.local_devices()]
    monkeypatch.setattr(jax.extend.backend, "backends", lambda: backends)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    try:
        pw.connect()
        (device,) = pw.make_virtual_device_set().add_slice(devices=1).devices
        assert device.platform == "cuda"
    finally:
        pw.disconnect()
    exported = jax.export.export(jax.jit(lambda x: x), platforms=[device.platform])(1.0)
    assert exported.platforms == ("cuda",)


def accelerator(process: int, limit_bytes: int | None) -> Any:
    """A device of one of several processes; only its own can ask for its memory."""

    def memory_stats() -> dict[str, int] | None:
        assert process == 1, "it is another host's device"
        return None if limit_bytes is None else {"bytes_limit": limit_bytes}

    return SimpleNamespace(
        process_index=process, memory_stats=memory_stats, platform="gpu", device_kind="H9"
    )


def join(hosts: tuple[str, ...], rank: int, devices: int, bound_bytes: int | None = None) -> Any:
    """What becomes of a host that joins its island: its answer, or the error that it stops with."""

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        daemon: Any = SimpleNamespace(loop=loop)
        memory = "" if bound_bytes is None else str(bound_bytes)
        options = HostOptions(
            controller="", name="h1", platform="cuda", devices=devices, device_memory=memory
        )
        host = HostRuntime(options, daemon, "127.0.0.1", None)

        def stop(reason: str, error: ErrorReport | None) -> None:
            ended.set_result(error)

        def joined(answer: IslandJoined | IslandJoinFailed) -> None:
            ended.set_result(answer)

        host.stop = stop  # type: ignore[method-assign]
        host.join(FormIsland("east", 1, hosts, rank, "", b""), joined)
        return await asyncio.wait_for(ended, 60)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("own", "bound_bytes", "least"),
    [
        ((80, 70), None, 70),
        ((None, 70), None, 70),
        ((None, None), None, None),
        ((None, None), 60, 60),
        ((80, 70), 60, 60),
        ((80, 70), 75, 70),
    ],
)
def test_a_host_of_several_tells_the_least_memory_of_its_own_devices(
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[int | None, ...],
    bound_bytes: int | None,
    least: int | None,
) -> None:
    devices = [accelerator(0, 10), *(accelerator(1, limit_bytes) for limit_bytes in own)]
    monkeypatch.setattr(group, "join", lambda *where, **how: devices)
    answer = join(("h0", "h1"), rank=1, devices=2, bound_bytes=bound_bytes)
    assert isinstance(answer, IslandJoined)
    assert answer.memory_bytes == least


def test_a_platform_that_jax_cannot_open_is_not_for_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def devices() -> Any:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    error = join(("h1",), rank=0, devices=1)
    assert "is it installed with support for cuda" in error.message
    assert "epoch" not in error.message


def test_a_host_with_too_many_gpus_is_told_how_to_see_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "join", lambda *where, **how: [accelerator(1, None)] * 4)
    error = join(("h1",), rank=0, devices=2)
    assert "--devices 4, or have CUDA_VISIBLE_DEVICES name 2" in error.message


def test_workers_of_one_machine_share_no_gpu() -> None:
    assert [visible_gpus(worker, 2, None) for worker in range(3)] == ["0,1", "2,3", "4,5"]
    shown = "GPU-8a, 5,3,GPU-0b,1"
    assert [visible_gpus(worker, 2, shown) for worker in range(2)] == ["GPU-8a,5", "3,GPU-0b"]
    for worker, few in ((2, shown), (0, "7"), (0, "")):
        with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES names"):
            visible_gpus(worker, 2, few)


@pytest.mark.parametrize(
    ("devices", "platform", "count", "visible"),
    [(None, "cuda", 4, "3,1,0,2"), (2, "cuda", 2, "3,1"), (8, "cpu", 8, None)],
)
def test_a_cluster_beside_a_script_has_gpus_if_there_are_enough(
    devices: int | None,
    platform: str,
    count: int,
    visible: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0,2")
    monkeypatch.setattr(embedded, "find_spec", lambda name: name == "jax_cuda13_plugin")
    monkeypatch.setattr(embedded, "start_with_worker", lambda *arguments: arguments[1:])
    thread: Any = None
    start: Any = embedded.with_worker(devices, thread)
    *asked, _, shown = start(None)
    assert asked == [platform, count]
    assert shown.get("CUDA_VISIBLE_DEVICES") == visible
    assert ("8 devices are asked for" in capsys.readouterr().err) == (platform == "cpu")
    assert embedded.devices_of_machine(None, islands=2) == ("cuda", 2)
    assert embedded.devices_of_machine(4, islands=2) == ("cpu", 4)


@pytest.mark.processes
def test_a_child_has_the_flags_of_its_parent_but_for_the_number_of_cpu_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "told.py").write_text(
        "import os, sys\n"
        "names = 'XLA_FLAGS', 'JAX_PLATFORMS', 'CUDA_VISIBLE_DEVICES'\n"
        "print([os.environ.get(name) for name in names], file=open(sys.argv[1], 'w'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    flags = "--xla_gpu_autotune_level=0 --xla_force_host_platform_device_count=8 --xla_dump_to=/x"
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    kept = "--xla_gpu_autotune_level=0  --xla_dump_to=/x"
    for environment, visible in (({}, "7"), ({"CUDA_VISIBLE_DEVICES": "2,3"}, "2,3")):
        child = LocalDaemon("told", [str(tmp_path / "found")], environment)
        child.wait(60)
        child.stop()
        assert (tmp_path / "found").read_text().strip() == repr([kept, None, visible])


@pytest.mark.parametrize(
    ("platform", "processes", "kept"),
    [("cpu", (0, 1), True), ("gpu", (1, 1), True), ("gpu", (0, 1), False), ("tpu", (0, 1), False)],
)
def test_what_processes_compile_together_for_accelerators_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    platform: str,
    processes: tuple[int, ...],
    kept: bool,
) -> None:
    stubs: Any = [SimpleNamespace(platform=platform, process_index=index) for index in processes]
    judge = executables.may_be_kept
    monkeypatch.setattr(executables, "may_be_kept", lambda devices: judge(stubs))

    async def counters() -> dict[str, int]:
        async with open_host(tmp_path) as host:
            assert await host.install(b"k", export(add_one, [spec_of()], [spec_of()])) is None
            return host.backend.counters()

    asyncio.run(counters())
    assert len([*tmp_path.iterdir()]) == kept
    again = asyncio.run(counters())
    assert (again["executables_loaded"], again["compilations"]) == (kept, not kept)


def test_no_gang_is_compiled_behind_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts wait for each other while they compile, and clients may ask them in different orders."""
    second, make, begun = threading.Event(), making.make, []

    def in_step(*order: Any) -> Any:
        begun.append(order)
        if len(begun) == 1:
            assert second.wait(60), "the peer, which began with the other one, waits for ever"
        second.set()
        return make(*order)

    monkeypatch.setattr(compiling, "may_be_kept", lambda devices: False)
    monkeypatch.setattr(making, "make", in_step)

    async def run() -> None:
        async with open_host() as host:
            functions = add_one, lambda x: (x + 2,)
            exported = [export(function, [spec_of()], [spec_of()]) for function in functions]
            installs = [host.install(b"%d" % at, code) for at, code in enumerate(exported)]
            assert await asyncio.gather(*installs) == [None, None]
            assert host.backend.counters()["compilations"] == len(begun) == 2

    asyncio.run(run())
