"""What a program saw and left, as JSON that can be compared: trees, errors, names of files."""

from __future__ import annotations

__all__ = ("describe", "files_of")

import builtins
import dataclasses
import hashlib
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, cast

import jax
import numpy as np

_LEFT_OUT = re.compile(
    r"(^|/)(ocdbt\.process_\d+|d|\.?penstock[^/]*|\.zarray|\.zattrs|zarr\.json|c|\d+(\.\d+)*)(/|$)"
)
"""Names that differ by design: parts of a database, names of data files, chunks, what only penstock adds."""


def describe(value: Any) -> Any:
    """Return a value as JSON: containers by their types, arrays by dtype, shape, sharding and bytes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, BaseException):
        return {"error": _kind(type(value))}
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, PurePath):
        return {"path": value.name}
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {
            "key": str(jax.random.key_impl(value)),
            "data": describe(np.asarray(jax.random.key_data(value))),
        }
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _array(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return {"shape": list(value.shape), "dtype": str(value.dtype), "sharding": _sharding(value.sharding)}
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {"type": type(value).__name__, "items": [[str(key), describe(one)] for key, one in items]}
    if isinstance(value, tuple | list):
        return {"type": type(value).__name__, "items": [describe(one) for one in cast("Any", value)]}
    if isinstance(value, set | frozenset):
        return {"type": type(value).__name__, "items": sorted(map(str, cast("Any", value)))}
    if dataclasses.is_dataclass(value):
        fields = [[one.name, describe(getattr(value, one.name, None))] for one in dataclasses.fields(value)]
        return {"type": type(value).__name__, "items": fields}

    return _node(value)


def _node(value: Any) -> Any:
    """Return a node of a tree, or what is none, as JSON."""
    children, structure = jax.tree_util.tree_flatten_with_path(value)
    if jax.tree_util.treedef_is_leaf(structure):
        return {"type": type(value).__name__, "text": re.sub(r"0x[0-9a-f]+", "", repr(value))}

    named = [[jax.tree_util.keystr(path), describe(one)] for path, one in children]
    return {"type": type(value).__name__, "items": named}


def _array(value: Any) -> Any:
    held = np.ascontiguousarray(np.asarray(value))
    found = {
        "type": "jax.Array" if isinstance(value, jax.Array) else type(value).__name__,
        "shape": list(held.shape),
        "dtype": str(held.dtype),
        "bytes": hashlib.sha256(held.tobytes()).hexdigest()[:16],
    }
    if isinstance(value, jax.Array):
        found["sharding"] = _sharding(value.sharding)

    return found


def _sharding(sharding: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", repr(sharding))


def _kind(error: type[BaseException]) -> str:
    """Name the built-in class that an error is first, which is what a program can catch in either library."""
    return next(one.__name__ for one in error.__mro__ if getattr(builtins, one.__name__, None) is one)


def files_of(directory: Path) -> list[str]:
    """List what is below a directory, but for what differs by design."""
    found = (str(path.relative_to(directory)) for path in directory.rglob("*"))
    return sorted(name for name in found if not _LEFT_OUT.search(name))
