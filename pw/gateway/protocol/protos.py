"""The messages of JAX's remote protocol, read out of the installed jaxlib.

jaxlib's shared library holds the descriptor of each protobuf file that it was built with, in
serialized form. So no copy of them lies here, and the gateway always speaks as the installed client.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from pw.core.errors import VersionMismatch

_FILES = (
    "xla/pjrt/proto/compile_options.proto",
    "xla/python/ifrt/custom_call_program.proto",
    "xla/python/ifrt/layout_serdes.proto",
    "xla/python/ifrt/sharding_serdes.proto",
    "xla/python/ifrt_proxy/common/array_util.proto",
    "xla/python/ifrt_proxy/common/grpc_ifrt_service.proto",
    "xla/python/ifrt_proxy/common/ifrt_service.proto",
    "xla/python/pjrt_ifrt/xla_compiler.proto",
    "xla/python/pjrt_ifrt/xla_host_callback.proto",
    "xla/python/pjrt_ifrt/xla_sharding.proto",
)
"""Files whose messages the gateway uses; it needs those that they import, too."""

_NAME = re.compile(rb"\n([\x08-\x7f])((?:xla|google|tsl)/[\w/.]*?\.proto)")
"""The first field of a descriptor: its file's name, after the length of it."""

_BYTES_FIELDS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 9, 12})
_NUMBER_FIELDS = frozenset({10, 11, 14})
"""The fields of a FileDescriptorProto by the form in which they are encoded."""


@cache
def message(name: str) -> Any:
    """Return the class of the message with this full name.

    Raises:
        VersionMismatch: the installed jaxlib does not have it.
    """
    try:
        return message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))
    except KeyError:
        raise _not_fitting(f"no message {name}") from None


def enum(name: str) -> dict[str, int]:
    """Return the values of an enumeration by their names. Raises VersionMismatch."""
    try:
        return {one.name: one.number for one in _pool().FindEnumTypeByName(name).values}
    except KeyError:
        raise _not_fitting(f"no enumeration {name}") from None


def _not_fitting(what: str) -> VersionMismatch:
    return VersionMismatch(
        f"the gateway cannot read JAX's remote protocol out of jaxlib {version('jaxlib')}: {what}. "
        "Install the version of jax that pw names in its requirements"
    )


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    descriptors, by_name = _descriptors(), dict[str, Any]()
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        while name not in by_name:
            try:
                by_name.update([next(descriptors)])
            except StopIteration:
                raise _not_fitting(f"no file {name}") from None
        for dependency in by_name[name].dependency:
            add(dependency)
        pool.AddSerializedFile(by_name[name].SerializeToString())

    for name in _FILES:
        add(name)
    return pool


def _descriptors() -> Iterator[tuple[str, Any]]:
    """Yield the descriptors in jaxlib's shared library: they lie together near its begin."""
    package = importlib.util.find_spec("jaxlib")
    assert package is not None
    assert package.origin is not None
    library = Path(package.origin).parent / "libjax_common.so"
    if not library.exists():
        raise _not_fitting(f"no {library.name}")
    with (
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        for match in _NAME.finditer(content):
            if match[1][0] != len(match[2]):
                continue
            descriptor = descriptor_pb2.FileDescriptorProto()
            try:
                descriptor.ParseFromString(content[match.start() : _end(content, match.start())])
            except DecodeError:
                continue
            yield descriptor.name, descriptor


def _end(content: mmap.mmap, start: int) -> int:
    """Return where the descriptor ends that starts here: at the first byte that is no field of it."""
    at = start
    while True:
        try:
            tag, after = _varint(content, at)
            field, form = tag >> 3, tag & 7
            if field == 1 and at != start:
                return at  # the next descriptor
            if form == 2 and field in _BYTES_FIELDS:
                size, after = _varint(content, after)
                after += size
            elif form == 0 and field in _NUMBER_FIELDS:
                _, after = _varint(content, after)
            else:
                return at
        except (IndexError, ValueError):
            return at
        if after > len(content):
            return at
        at = after


def _varint(content: mmap.mmap, at: int) -> tuple[int, int]:
    """Return the number at this place, and where it ends. Raises ValueError, IndexError."""
    number = shift = 0
    while True:
        byte = content[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, at
        if shift > 63:
            raise ValueError("no number")
