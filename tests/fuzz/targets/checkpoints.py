"""Checkpoints on disk: manifests, files of tensors, and descriptions of trees.

No input may make a host open a file outside of the checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pw.client.checkpoints import tree as checkpoint_tree
from pw.client.checkpoints.tree import Leaf, Tree, TreeNode
from pw.core.errors import ArgumentError, CheckpointFailed, OutOfHostMemory
from pw.core.messages import CommitFiles, CopyFile, Described, FileSource
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.devices.host import checkpoint_format as form
from pw.devices.host.checkpoint_reader import CheckpointReader
from tests.fuzz.target import Run, Target

_ID = "0123456789abcdef"
_FILE = f"{_ID}-00000.safetensors"
_VALUE = np.arange(12, dtype=np.int32).reshape(3, 4)
_SPEC = ArraySpec((3, 4), "int32", Sharding(("x",), (1,)), Placement(1, (0,)))
_BOXES = [((0, 2), (0, 4)), ((2, 3), (0, 4))]
_ERRORS = (CheckpointFailed, ArgumentError, OutOfHostMemory)


class _Opened:
    """Refuses that this process opens, lists or changes files outside of one folder."""

    def __init__(self) -> None:
        self.folder = ""
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder or not event.startswith(("open", "os.")):
            return
        for path in args[:2]:
            name = os.fsdecode(path) if isinstance(path, (str, bytes)) else ""
            is_part = "/" not in name and name != ".."  # of a folder that was opened before
            if not is_part and name != "/" and not os.path.abspath(name).startswith(self.folder):
                self.folder = ""
                raise AssertionError(f"{event} of {name!r}, outside of the checkpoint")


_opened_files: list[_Opened] = []


@contextmanager
def _within(folder: str) -> Iterator[None]:
    if not _opened_files:
        _opened_files.append(_Opened())
    _opened_files[0].folder = folder
    try:
        yield
    finally:
        _opened_files[0].folder = ""


def _write(path: str) -> None:
    """Write a checkpoint of one array in two boxes, as a host does."""
    job = CopyFile(_ID, path, False, _FILE, ("a",), ())
    shards = [form.Shard("a", _SPEC, box, _VALUE[slice(*box[0]), slice(*box[1])]) for box in _BOXES]
    form.write(job, shards)
    tree = checkpoint_tree.single_tree((3, 4), "int32")
    form.commit(CommitFiles(_ID, path, False, (_FILE,), tree, ()))


def _contents() -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.realpath(folder) + "/saved"
        _write(path)
        return Path(path, form.MANIFEST).read_bytes(), Path(path, _FILE).read_bytes()


@contextmanager
def _checkpoint(file: str) -> Iterator[Run]:
    manifest, tensors = _contents()
    files: dict[str, Any] = msgspec.json.decode(manifest)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.realpath(folder)
        Path(path, form.MANIFEST).write_bytes(manifest)
        Path(path, _FILE).write_bytes(tensors)

        def run(data: bytes) -> None:
            Path(path, file).write_bytes(data)
            if file == _FILE:
                files["files"][_FILE]["size_bytes"] = len(data)
                Path(path, form.MANIFEST).write_bytes(msgspec.json.encode(files))
            with _within(path):
                name, _ = form.describe(path)
                reader = CheckpointReader(path, name)
                whole, part = reader.read(
                    FileSource(path, name, "a"), _SPEC, [((0, 3), (0, 4)), ((1, 3), (1, 2))]
                )
            assert whole.shape == (3, 4)
            assert part.shape == (2, 1)
            if file == _FILE:  # there are checksums
                np.testing.assert_array_equal(whole, _VALUE)

        yield run


def _trees() -> list[bytes]:
    leaves = [
        [Leaf("", "array", (3, 4), "int32")],
        [
            Leaf("['w']", "['w']", (8, 8), "bfloat16", weak=True),
            Leaf("['k']", "['k']", (2,), "uint32", "threefry2x32"),
            Leaf("['n']", number=("int", "7")),
            Leaf("['c']", number=("complex", "(1+2j)")),
            Leaf("['b']", number=("bool", "True")),
            Leaf("['s']", number=("str", "a string")),
            Leaf("['x']", "", (2,), "float32", data=bytes(8)),
        ],
    ]
    node = TreeNode(
        "dict",
        [TreeNode(), TreeNode("tuple", [TreeNode("none"), TreeNode()]), TreeNode("list")],
        ["w", 1, "l"],
    )
    trees = [
        *leaves,
        *(Tree(one, TreeNode("list", [TreeNode() for _ in one])) for one in leaves),
        Tree(leaves[1], node),
    ]
    return [msgspec.json.encode(one) for one in trees]


def _restore(data: bytes) -> None:
    tree = checkpoint_tree.read(Described(1, _ID, data), "a path")
    for leaf in tree.leaves:
        leaf.like()
    if tree.structure.count() == len(tree.leaves):
        tree.structure.tree(iter(tree.leaves))


TARGETS = [
    Target(
        "manifests",
        lambda: [_contents()[0]],
        opened=partial(_checkpoint, form.MANIFEST),
        allowed=_ERRORS,
        weight=0.2,
    ),
    Target(
        "tensors",
        lambda: [_contents()[1]],
        opened=partial(_checkpoint, _FILE),
        allowed=_ERRORS,
        weight=0.1,
    ),
    Target("trees", _trees, _restore, allowed=(CheckpointFailed,), weight=2),
]
