"""Chooses what of a tree goes into a NumPy archive, and under which names. Pure."""

from __future__ import annotations

__all__ = ("MemberToWrite", "plan_comment", "plan_members")

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.leaves.stored_value import StoredValue, StoredValueHandler
from penstock.kernel.errors import DuplicateNameError, InvalidLeafError, SpecError
from penstock.kernel.messages.save import Leaf
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.stages.pytree.flattening import FlatLeaf, flatten_tree, is_empty

_ARRAY: Final = ".npy"
_HANDLER: Final = StoredValueHandler()
_MOST_NAME_BYTES: Final = 2**16 - 1
_MOST_COMMENT_BYTES: Final = 2**16 - 1
_SAID: Final = 3  # of leaves that are refused


@final
@dataclass(frozen=True, slots=True, eq=False)
class MemberToWrite:
    """One array of an archive."""

    file: str  #: its name in the archive
    head: bytes  #: what comes before the array
    leaf: Leaf | None  #: with the array, whole and in C order; None if `data` is
    data: bytes = b""

    @property
    def array_nbytes(self) -> int:
        """Bytes of the array."""
        return len(self.data) if self.leaf is None else self.leaf.spec.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the member."""
        return len(self.head) + self.array_nbytes


def plan_members(tree: object) -> Sequence[MemberToWrite]:
    """Say what is written for each leaf of a tree of `StoredValue`s and texts.

    Raises:
        InvalidLeafError: If NumPy has no such elements, or a name that no archive can hold.
        DuplicateNameError: If two members would have one name.
        SpecError: If there are None and empty containers; the first are named.
    """
    leaves, _ = flatten_tree(tree)
    empty = [leaf.info for leaf in leaves if is_empty(leaf.value)]
    if empty:
        listed = ", ".join([info.key_path or "the root" for info in empty[:_SAID]])
        more = f" and {len(empty) - _SAID} more" if len(empty) > _SAID else ""
        problem = f"an npz file holds arrays alone, and no None and no empty containers: {listed}{more}"
        raise SpecError(f"{problem}; leave them out, as in rename={{{empty[0].name!r}: None}}")

    _check_names([leaf.info for leaf in leaves])
    return [_member(leaf) for leaf in leaves]


def plan_comment(metadata: Mapping[str, Any] | None) -> bytes:
    """Return the comment of the archive, which holds the metadata.

    Raises:
        SpecError: If it is too long for one, or no JSON.
    """
    try:
        comment = json.dumps(metadata).encode() if metadata else b""
    except (TypeError, ValueError) as error:
        raise SpecError(f"custom_metadata is no JSON: {error}") from error
    if len(comment) > _MOST_COMMENT_BYTES:
        problem = (
            f"the metadata takes {len(comment)} bytes, and an npz file has room for {_MOST_COMMENT_BYTES}"
        )
        raise SpecError(problem)

    return comment


def _check_names(infos: Sequence[ParamInfo]) -> None:
    """Refuse names that a zip archive cannot hold, or that `numpy.load` would take for one another."""
    known = {info.name: info.key_path for info in infos}
    for info in infos:
        if "\0" in info.name:
            raise InvalidLeafError(
                info.key_path, "its name has a zero byte, where a zip archive would cut it"
            )
        if len((info.name + _ARRAY).encode()) > _MOST_NAME_BYTES:
            raise InvalidLeafError(info.key_path, "its name is too long for a zip archive")
        if info.name + _ARRAY in known:  # numpy takes `a.npy` for `a`, too
            raise DuplicateNameError(info.name + _ARRAY, info.key_path, known[info.name + _ARRAY])


def _member(leaf: FlatLeaf) -> MemberToWrite:
    info, value = leaf.info, leaf.value
    file = info.name + _ARRAY
    if isinstance(value, str):
        text = np.array(value)
        if text[()] != value:
            raise InvalidLeafError(info.key_path, "ends with zero characters, which numpy cuts off")

        return MemberToWrite(file, _head(text.dtype, ()), None, text.tobytes())

    assert isinstance(value, StoredValue), "a tree of a conversion holds nothing else"
    spec = _HANDLER.describe(value, info)
    _check(info, spec)
    shape = spec.shape or ()
    whole = replace(spec, chunk_shape=tuple([n or 1 for n in shape]), write_shape=None, codec=None)
    head = _head(numpy_dtype(spec.dtype), shape)
    return MemberToWrite(file, head, Leaf(0, info, value, whole, _HANDLER))


def _check(info: ParamInfo, spec: LeafSpec) -> None:
    dtype = numpy_dtype(spec.dtype)
    if spec.random_key_impl is not None:
        problem = f"is an array of PRNG keys ({spec.random_key_impl}), which an npz file cannot say"
        problem += f"; leave it out, as in rename={{{info.name!r}: None}}"
        raise InvalidLeafError(info.key_path, problem)
    if dtype.isbuiltin != 1:
        other = "int8" if "int" in spec.dtype else "float32"
        problem = f"numpy has no elements of type {spec.dtype}; cast it, as in dtype={other!r}"
        raise InvalidLeafError(info.key_path, problem)


def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    head = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, about)
    return head.getvalue()
