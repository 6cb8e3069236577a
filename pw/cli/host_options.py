"""What `pw-worker` tells the runtime of its host. Imports nothing heavy."""

from __future__ import annotations

import msgspec

from pw.core.actors.watchdog import STALL_S


class HostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one host; times are in seconds, sizes in bytes."""

    controller: str
    """Endpoint of the controller."""
    island: str
    """Name of the island to join; empty for a spare that takes any place."""
    name: str
    """Name of this host in the cluster."""
    island_hosts: int = 1
    """Hosts of the island; 0 for a spare."""
    devices: int = 1
    platform: str = "cpu"
    device_memory: int = 0
    """Memory of each device that runs may use; 0 for what the device says."""
    bind: str = ""
    """Endpoint at which the host listens; empty for a free one."""
    heartbeat: float = 1.0
    lease: float = 10.0
    connect_timeout: float = 8.0
    reconnect: float = 60.0
    allow_python: bool = False
    python_tenants: str = ""
    python_memory: int = 0
    """Memory of a process with clients' functions; 0 for any."""
    compile_cache: str | None = None
    """Folder of compiled computations; None for the default one, empty for none."""
    checkpoint_root: str = ""
    compile_timeout: float = 600.0
    compile_memory: int = 8 << 30
    stall_after: float = STALL_S
    credentials: str = ""
    revoked: str = ""
    insecure: bool = False
    advertise: str = ""
    private_address: str = ""
    log_level: str = "error"
