"""Unmodified JAX on the session's virtual devices.

    PW_ADDRESS=tcp://… JAX_PLATFORMS=pw python script.py

or, before the first use of JAX, `import pw.jax; pw.jax.connect()`. Then `jax.devices()` are virtual
devices of the cluster (without an address: of the embedded one), and everything in JAX runs there.
JAX finds this module by its entry point in the group `jax_plugins`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pw.client.keywords import checks_keywords
from pw.core.errors import Error
from pw.transport.access.joined import default_address

__all__ = ["connect", "from_jax", "initialize", "lookup", "publish", "sharding_of", "to_jax"]

PLATFORM = "pw"
_arguments: dict[str, Any] = {}
"""The arguments of `connect`, with which JAX has its devices; they are options of `pw gateway`."""


def initialize() -> None:
    """Register the platform `pw` with JAX, if it was asked for; called by JAX when it looks for plugins."""
    import jax

    asked: str = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    if PLATFORM in asked.split(","):
        _register()
        _add_cpu(asked)
    elif "proxy" in asked.split(","):
        from pw.gateway import forks

        forks.close_in_forks_of(jax.config.read("jax_backend_target"))


@checks_keywords
def connect(
    address: str | None = None,
    *,
    devices: int | None = None,
    islands: int | Sequence[str] | None = None,
    share: float = 1.0,
    priority: int = 0,
) -> None:
    """Make JAX use virtual devices of a cluster; call it before the first use of JAX.

    Again with the same arguments it does nothing.

    Args:
        address: as of `pw.connect`.
        devices: how many devices, over all islands; `PW_DEVICES`, else all there are.
        islands: how many islands, or their names; `PW_ISLANDS`, else all there are.
        share: weight of this client under `pw-controller --policy share`.
        priority: importance of this client under `pw-controller --policy priority`.

    Raises:
        Error: JAX has chosen other devices already.
        ConnectionFailed: no controller answers at the address.
    """
    from pw.core.jax_private import runtime

    arguments = _completed(address, devices, islands, share, priority)
    if runtime.is_started():
        if arguments == _arguments:
            return
        if _arguments:
            shown = ", ".join(f"{name}={value!r}" for name, value in _arguments.items() if value)
            raise Error(
                f"JAX is connected already, by pw.jax.connect({shown}); it keeps these devices as long as this "
                "process (in a notebook: the kernel) runs"
            )
        raise Error(
            "JAX has its devices already; call pw.jax.connect() before the first use of JAX, or start the "
            "script with JAX_PLATFORMS=pw"
        )
    _arguments.update(arguments)
    import jax

    _register()
    _add_cpu(PLATFORM)
    jax.config.update("jax_platforms", PLATFORM)
    jax.devices()


def _completed(
    address: str | None = None,
    devices: int | None = None,
    islands: int | Sequence[str] | None = None,
    share: float = 1.0,
    priority: int = 0,
) -> dict[str, Any]:
    """Return the arguments of `connect`, as `pw gateway` takes them."""
    return {
        "address": address or default_address(),
        "devices": devices or 0,
        "islands": str(islands) if isinstance(islands, int) else ",".join(islands or ()),
        "share": share,
        "priority": priority,
    }


def _add_cpu(platforms: str) -> None:
    """Keep the script's own CPU as a second platform, which is `cpu` unless the cluster's devices are."""
    from jax.extend.backend import register_backend_factory

    from pw.core.jax_private import runtime
    from pw.gateway import in_jax

    # An alias: the user's setting of jax_platforms stays as it is.
    if "cpu" not in platforms.split(","):
        register_backend_factory(in_jax.SCRIPT_CPU, in_jax.make_script_cpu, priority=-1)
        runtime.add_alias(PLATFORM, [PLATFORM, in_jax.SCRIPT_CPU])


def _register() -> None:
    from jax.extend.backend import register_backend_factory

    from pw.core.jax_private import runtime

    if not runtime.is_registered(PLATFORM):
        register_backend_factory(PLATFORM, _backend, priority=-1, fail_quietly=False)


def _backend() -> Any:
    """Return JAX's client of the gateway in this process."""
    from pw.core import installed
    from pw.core.variables import warn_of_misspelt

    installed.check()
    installed.check_extra("jax", "hpack", "google.protobuf")
    from pw.gateway import beside, in_jax

    warn_of_misspelt(os.environ)
    if not _arguments:  # by JAX_PLATFORMS
        _arguments.update(_completed())
    options = ((f"--{name}", str(value)) for name, value in _arguments.items())
    arguments = [part for option in options for part in option]
    client = beside.client(arguments, has_cluster=not _arguments["address"])
    in_jax.install(client)
    return client


def from_jax(tree: Any) -> Any:
    """Return the tree with a `pw.Array` in the place of each `jax.Array` on virtual devices; no bytes move.

    Both arrays exist from then on, and share their memory: each is deleted, donated and checkpointed apart; if
    one is donated, its shards are copied first. Connects this process to the cluster of JAX's devices. Typed
    keys keep their type; other leaves stay as they are. Every `pw.jit` function and `pw.program` does this
    with its arguments, and `pw.put` and `pw.checkpoint` with theirs.

    Raises:
        ArrayDeleted: an array was deleted or donated.
        PlacementError: an array is in another memory than its devices' default one.
        ShardingError: an array is not divided evenly.
        Error: this process is connected to another cluster.
    """
    from jax.tree_util import tree_flatten, tree_unflatten

    import pw.client.functions.function  # noqa: F401 - compiles the operators of the arrays
    from pw.client.arrays import jax_arrays

    leaves, structure = tree_flatten(tree)
    return tree_unflatten(structure, jax_arrays.from_jax(leaves))


def to_jax(tree: Any) -> Any:
    """Return the tree with a `jax.Array` in the place of each `pw.Array`; no bytes move.

    As with `from_jax`, both arrays exist from then on. An array must lie on devices that JAX has: what
    functions made of such arrays does; others are moved first, with `pw.put(x, sharding=sharding_of(s))`.

    Raises:
        ArrayDeleted: an array was deleted or donated.
        PlacementError: an array lies on other devices.
        Error: JAX has no virtual devices in this process.
    """
    from jax.tree_util import tree_flatten, tree_unflatten

    from pw.client.arrays import jax_arrays

    leaves, structure = tree_flatten(tree)
    return tree_unflatten(structure, jax_arrays.to_jax(leaves))


@checks_keywords
def publish(name: str, tree: Any, *, keep: Any = None, to: Any = None) -> Any:
    """Give the arrays of a tree a name, as `pw.publish` does; no bytes move.

    Raises:
        ArgumentError: the name, `keep` or `to` is none, or the tree has other values.
        ArrayDeleted: an array was deleted or donated.
        Error: this process is connected to another cluster.
    """
    from pw.client.arrays import jax_arrays
    from pw.client.sharing import publish as sharing

    _begin()
    jax_arrays.front()  # connects this process to the cluster of JAX's devices
    return sharing.publish(name, tree, keep=keep, to=to)


@checks_keywords
def lookup(
    name: str,
    *,
    version: int | None = None,
    after: int | None = None,
    like: Any = None,
    wait: float = 0.0,
) -> Any:
    """Return the tree that was published under a name, with a `jax.Array` for each array; as `pw.lookup`.

    Without `like` no bytes move. JAX may donate the arrays: their shards are copied first, and what others have
    stays as it is.

    Args:
        name: the name, or `tenant/name`.
        version: number of the version; None for the newest.
        after: only a version with a higher number.
        like: a sharding over `jax.devices()`, or a tree prefix of such or of arrays, that say where each
            array is to lie.
        wait: seconds to wait until there is such a version.

    Raises:
        NameNotFound: nothing that this session may read is published under the name.
        PlacementError: without `like`, the arrays lie on devices that JAX does not have.
        ShardingError: an array cannot be split as `like` says.
        Error: JAX has no virtual devices in this process.
    """
    import jax

    from pw.client.arrays import jax_arrays
    from pw.client.arrays.array import Array
    from pw.client.sharing import lookup as sharing

    _begin()
    front = jax_arrays.front()
    place = front.devices_of if like is None else lambda slice_: slice_.devices
    tree = sharing.looked_up(name, version, after, like, wait, place)
    arrays = to_jax(tree)
    if any(isinstance(leaf, Array) for leaf in jax.tree_util.tree_leaves(tree)):
        sharing.note_in_jax(arrays, sharing.version_of(tree))
    return arrays


def _begin() -> None:
    """Have JAX begin its client, in which the virtual devices are."""
    import jax

    jax.devices()


def sharding_of(sharding: Any, shape: Sequence[int] = ()) -> Any:
    """Return the sharding over slices of this process with the same shards as one over `jax.devices()`.

    Args:
        sharding: over `jax.devices()`.
        shape: of the arrays; only a `jax.sharding.NamedSharding` can do without.

    Raises:
        ShardingError: it does not divide such an array evenly.
        Error: JAX has no virtual devices in this process.
    """
    from pw.client.arrays import jax_arrays

    return jax_arrays.front().from_jax(sharding, tuple(shape)).of_jax
