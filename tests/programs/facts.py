"""What a program saw and left, as JSON that can be compared: trees, errors, names of files."""

from __future__ import annotations

__all__ = ("describe", "differences", "files_of")

import builtins
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any

import jax
import numpy as np

_LEFT_OUT = re.compile(
    r"(^|/)(ocdbt\.process_\d+|[cd]|[._]?penstock[^/]*|orbax\.checkpoint|metadata/commit_success\.txt)(/|$)",
    re.IGNORECASE,
)
"""Names that differ by design: parts of a database, files of chunks, and what only penstock adds: so a mark
in the metadata of a directory of steps."""

_CHUNK = re.compile(r"\d+(\.\d+)*")


def describe(value: Any) -> Any:
    """Return a value as JSON: containers by their types, arrays by dtype, shape, sharding and bytes."""
    if isinstance(value, jax.Array) and str(value.dtype).startswith("key<"):
        # The sharding of its data depends on how it was made, and splits them alike.
        data = np.asarray(jax.random.key_data(value))
        return {"key": str(value.dtype), "data": describe(data), "sharding": _text(value.sharding)}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _array(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return {"shape": list(value.shape), "dtype": str(value.dtype), "sharding": _text(value.sharding)}
    if isinstance(value, BaseException):
        return {"error": _kind(type(value))}
    if isinstance(value, Enum):
        return {"type": type(value).__name__, "text": value.name}
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)  # 1, 1.0 and True are equal
    if isinstance(value, PurePath):
        return {"path": value.name}
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        pairs = [[repr(key), describe(one)] for key, one in items.items()]
        return {"type": type(value).__name__, "items": pairs}
    if isinstance(value, set | frozenset):
        members: set[Any] | frozenset[Any] = value
        return {"type": type(value).__name__, "items": sorted(map(repr, members))}
    if dataclasses.is_dataclass(value):
        fields = [[one.name, describe(getattr(value, one.name, None))] for one in dataclasses.fields(value)]
        return {"type": type(value).__name__, "items": fields}
    if isinstance(value, tuple | list):
        each: tuple[Any, ...] | list[Any] = value
        return {"type": type(value).__name__, "items": [describe(one) for one in each]}

    return _node(value)


def _node(value: Any) -> Any:
    """Return a node of a tree, or what is none, as JSON."""
    children, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda one: one is not value)
    if jax.tree_util.treedef_is_leaf(structure):
        return {"type": type(value).__name__, "text": _text(value)}

    named = [[jax.tree_util.keystr(path), describe(one)] for path, one in children]
    return {"type": type(value).__name__, "items": named}


def _array(value: Any) -> Any:
    held = np.ascontiguousarray(np.asarray(value))
    found = {
        "type": "jax.Array" if isinstance(value, jax.Array) else type(value).__name__,
        "shape": list(np.shape(value)),
        "dtype": str(held.dtype),
        "bytes": hashlib.sha256(held.tobytes()).hexdigest()[:16],
    }
    if isinstance(value, jax.Array):
        found["sharding"] = _text(value.sharding)

    return found


def _text(value: object) -> str:
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


def _kind(error: type[BaseException]) -> str:
    """Name the built-in class that an error is first, which is what a program can catch in either library."""
    kinds: list[str] = [one.__name__ for one in error.__mro__ if getattr(builtins, one.__name__, None) is one]
    return kinds[0]


def files_of(directory: Path) -> list[str]:
    """List what is below a directory, but for what differs by design."""
    # A program may leave a manager open, whose files go when it is collected: `walk` passes over them.
    each = (Path(at, name) for at, folders, files in os.walk(directory) for name in (*folders, *files))
    found = {str(path.relative_to(directory)): path for path in each}
    return sorted(
        name
        for name, path in found.items()
        if not _LEFT_OUT.search(name) and not (path.is_file() and _CHUNK.fullmatch(path.name))
    )


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str = "") -> dict[str, str]:
    """Return what differs between the facts of two runs, by the name of the fact.

    Args:
        theirs: The facts with Orbax. A run that failed has one only, `failed`.
        ours: Those to compare.
        where: Follows each name.
    """
    if "failed" in theirs:
        return {f"failed with Orbax{where}": str(theirs["failed"])}
    if "failed" in ours:
        return {f"failed{where}": str(ours["failed"])}

    return {
        f"{name}{where}": "; ".join(_places(theirs.get(name), ours.get(name)))[:1_500]
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    }


def _places(theirs: Any, ours: Any, place: str = "") -> Iterator[str]:
    """Yield in words where two facts differ."""
    if theirs == ours:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict):
        first: dict[str, Any] = theirs
        second: dict[str, Any] = ours
        for name in first | second:
            yield from _places(first.get(name), second.get(name), f"{place}.{name}")
    elif isinstance(theirs, list) and isinstance(ours, list):
        one: list[Any] = theirs
        other: list[Any] = ours
        if all(isinstance(each, str) for each in (*one, *other)):  # names, of files for one
            yield f"{place} without {sorted({*one} - {*other})}, with {sorted({*other} - {*one})}"
        else:
            for index, both in enumerate(zip_longest(one, other)):
                yield from _places(*both, f"{place}[{index}]")
    else:
        yield f"{place}: {json.dumps(theirs)} != {json.dumps(ours)}"
