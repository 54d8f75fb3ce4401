"""A JSON document as the leaves of a tree. Pure.

Source:
    ORBAX_FORMAT.md §5.
"""

from __future__ import annotations

__all__ = ("json_leaves",)

from collections.abc import Iterator, Mapping
from typing import Final, cast

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.common.checked_json import parse_value
from penstock.handlers.formats.common.key_paths import MOST_LEVELS, KeyPathBudget, show_key_path
from penstock.handlers.formats.orbax.chunks.embedded_arrays import number
from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf

_Kinds = tuple[KeyKind, ...]

_MARKERS: Final[Mapping[type, str]] = {type(None): "None", dict: "Dict", list: "List"}


def json_leaves(path: str, data: bytes, directory: str) -> tuple[StoredLeaf, ...]:
    """Make leaves of numbers, strings, null and empty containers, in the document's order.

    Args:
        path: Of the document, for the error.
        data: Its content.
        directory: Put into every `ParamInfo`.

    Raises:
        CorruptCheckpointError: If it is not JSON.
        UnsupportedFormatError: If it is nested too deeply, or an int needs more than 64 bits.
    """
    budget = KeyPathBudget(path)
    leaves: list[StoredLeaf] = []
    for keys, kinds, value in _walk(path, parse_value(path, data), (), ()):
        budget.spend(keys)
        info = ParamInfo(keys, kinds, show_key_path(keys, kinds), directory)
        leaves.append(_leaf(path, info, value))

    return tuple(leaves)


def _walk(path: str, node: object, keys: KeyPath, kinds: _Kinds) -> Iterator[tuple[KeyPath, _Kinds, object]]:
    if not isinstance(node, dict | list) or not node:
        yield keys, kinds, node
        return
    if len(keys) == MOST_LEVELS:
        raise UnsupportedFormatError(path, f"is nested more than {MOST_LEVELS} levels deep")

    if isinstance(node, dict):
        for key, value in cast("dict[str, object]", node).items():
            yield from _walk(path, value, (*keys, key), (*kinds, KeyKind.MAPPING))
    else:
        for at, value in enumerate(cast("list[object]", node)):
            yield from _walk(path, value, (*keys, str(at)), (*kinds, KeyKind.SEQUENCE))


def _leaf(path: str, info: ParamInfo, value: object) -> StoredLeaf:
    if isinstance(value, str):
        return StoredLeaf(info, LeafSpec("string", text=value))
    if not isinstance(value, int | float):
        return StoredLeaf(info, LeafSpec(_MARKERS[type(value)]))

    array = number(path, value)
    if array is None:
        problem = f"an int of {value.bit_length()} bits; most are 64" if isinstance(value, int) else ""
        raise UnsupportedFormatError(path, problem, key_path=info.key_path)

    itemsize = numpy_dtype(array.dtype).itemsize
    return StoredLeaf(info, LeafSpec("scalar", (), array.dtype, itemsize), array)
