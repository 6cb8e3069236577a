"""What is wrong in a file of YAML: the line, the key by its path, and what to write instead."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from pw.core.near import did_you_mean

_KINDS = {
    "object": "keys with values",
    "array": "a list",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
}
_EXPECTED = re.compile(r"Expected `(.+?)`")


def parsed(text: bytes) -> Any:
    """Return the nodes of a file, with their places in it. Raises ValueError if it is no YAML."""
    import yaml

    try:
        return yaml.compose(text, yaml.CSafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{error.problem or error.context}: this is no YAML") from None
    except yaml.YAMLError as error:
        raise ValueError(f"this is no YAML: {' '.join(str(error).split())}") from None


def mistakes(node: Any, value: Any, kind: Any, path: str = "") -> Iterator[str]:
    """Yield what makes a part of a file no value of its type.

    Args:
        node: of YAML.
        value: what the node says.
        kind: a type: a struct, a container of structs, or a plain type.
        path: keys that lead to the part.
    """
    struct, item = _struct_of(kind), _item_of(kind)
    if isinstance(value, dict) and (struct or item):
        fields = typing.get_type_hints(struct) if struct else {}
        for key, child in node.value:
            name = str(key.value)
            inner = item or fields.get(name)
            if inner is None:
                where, line = path or "the file", key.start_mark.line + 1
                yield f"line {line}: {where} has no key {name}; {did_you_mean(name, fields)}"
            elif name in value:
                yield from mistakes(child, value[name], inner, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and item:
        for number, (child, one) in enumerate(zip(node.value, value, strict=True)):
            yield from mistakes(child, one, item, f"{path}[{number}]")
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            match = _EXPECTED.search(str(error))
            kinds = match.group(1).split(" | ") if match else []
            needed = " or ".join(_KINDS.get(one, one) for one in kinds) or str(error)
            yield f"line {node.start_mark.line + 1}: {path or 'the file'} needs {needed}, not {value!r}"


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a type is, or one of whose alternatives is one."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    structs = (one for one in kinds if isinstance(one, type) and issubclass(one, msgspec.Struct))
    return next(structs, None)


def _item_of(kind: Any) -> Any:
    """Return the type of the items of a list, or of the values of a dictionary; None for other types."""
    return typing.get_args(kind)[-1] if typing.get_origin(kind) in (list, dict) else None
