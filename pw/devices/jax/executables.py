"""Keeps compiled executables in a folder, so that a restarted island need not compile again.

Each executable is a file. Its name is a digest of the code, the number of devices, the versions,
the kind of processor and the threads that XLA divides the code for. The next incarnation of a worker
finds it, and so do other workers and later clusters. On accelerators, the name says also which devices:
there an executable is for these only.

A file holds what `pw.devices.jax.making.saved` writes: facts, and XLA's executable.

JAX's own persistent cache does not serve: on CPU it keeps only the executables of rank 0.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import jax

from pw.core.platforms import platform_of
from pw.devices.jax.group import POOL_VARIABLES
from pw.processes.kept_files import KeptFiles, cache_folder

LIMIT_BYTES = 2 << 30
"""Bytes of the folder at most; a larger one loses the executables that were used longest ago."""

_FORMAT = 4
"""Version of the files; it grows when a file holds something else."""


def default_folder() -> Path:
    """The folder for the executables of this user's workers, by default."""
    return cache_folder("executables")


def may_be_kept(devices: Iterable[jax.Device]) -> bool:
    """Whether one process may load an executable for `devices` while others compile it.

    On accelerators, processes that compile together divide the search for the quickest kernels
    among them, and wait for what the others have found.
    """
    first, *rest = devices
    return platform_of(first.platform).is_host or all(
        d.process_index == first.process_index for d in rest
    )


def key_of(devices: Sequence[jax.Device], *wish: object) -> bytes | None:
    """What an executable for these devices is saved under, if nothing else than `wish` determines it.

    CPU devices share it: XLA takes the device assignment when it loads an executable. None if it is
    not to be kept.
    """
    if not may_be_kept(devices):
        return None
    where: object = len(devices)
    if not platform_of(devices[0].platform).is_host:
        names = [f"{device.platform}:{device.process_index}:{device.id}" for device in devices]
        where = (names, jax.process_index(), jax.process_count())
    return hashlib.sha256(repr((where, wish)).encode()).digest()


class ExecutableFiles(KeptFiles):
    """The folder of executables; used by the compile thread only.

    Args:
        folder: made if it does not exist. None keeps nothing.
        limit_bytes: the most that the folder may hold.
    """

    def __init__(self, folder: Path | None, limit_bytes: int = LIMIT_BYTES) -> None:
        advice = (
            "give the folder to this user alone (chown, chmod -R go-w), or name another one with "
            "--compile-cache or XDG_CACHE_HOME"
        )
        super().__init__(folder, limit_bytes, "compiled executables", advice)

    def _versions(self) -> bytes:
        return machine()


@functools.cache
def machine() -> bytes:
    """The versions, flags, threads and kind of processor that an executable depends on."""
    try:
        cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        processor = [line for line in cpu if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        processor = [*os.uname()]
    device = jax.devices()[0]
    parts = (
        _FORMAT,
        jax.__version__,
        metadata.version("jaxlib"),
        device.client.platform_version,
        device.device_kind,
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        os.environ.get(POOL_VARIABLES[0], ""),
        processor,
    )
    return repr(parts).encode()
