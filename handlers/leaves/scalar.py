"""Leaves that are single numbers, of Python's or numpy's types, or strings."""

from __future__ import annotations

__all__ = (
    "ScalarHandler",
    "StringHandler",
)

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.dtypes import dtype_name, storable
from penstock.handlers.leaves.blocks import HostRegion, cast_to, shared_views
from penstock.handlers.leaves.devices import is_subtype
from penstock.handlers.leaves.stored_value import different, stored_dtype, targets_by_kind, type_name, type_of
from penstock.kernel.errors import InvalidLeafError, TreeDifference
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf, StoredRows
from penstock.kernel.protocols.leaf_handlers import Leaf, ReadLeaves
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.written import PiecePlan

_STORED_AS: Final[Mapping[type, np.dtype[Any]]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}
_KIND: Final[Mapping[type, type]] = {
    bool: np.bool_,
    int: np.integer,
    float: np.floating,
    complex: np.complexfloating,
}
_OF_WEAK: Final[Mapping[str, type]] = {"i": int, "f": float, "c": complex}  #: by the kind of a dtype
_ALIASES: Final[tuple[type, ...]] = (np.longlong, np.ulonglong)


@final
@dataclass(frozen=True, slots=True)
class ScalarHandler:
    """Stores a number as a 0-d array: int64, float64, bool, complex128, or a numpy scalar's own dtype.

    Without a target, a number is restored as a Python number. With a target, it gets exactly the target's
    type, which must be of the stored kind: numbers are never rounded, and an int never becomes a float.
    """

    typestr: str = "scalar"

    follows_spec = True  #: numbers are cast as the spec says

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        """Return the specs to store for numbers, by type.

        Raises:
            InvalidLeafError: If a value is an int that does not fit int64, an instance of a subclass of
                Python's number types, or a numpy scalar whose dtype cannot be stored.
        """
        specs: list[LeafSpec] = []
        for number, value in enumerate(values):
            kind: type = type(value)
            if kind is int and not -(1 << 63) <= value < 1 << 63:
                raise InvalidLeafError(
                    infos[number].key_path,
                    f"the int {_shortened(value)} does not fit int64; save it as a str or a uint64 array",
                )

            spec = known.get(kind)
            if spec is None:
                dtype = _dtype_of(value, infos[number])
                spec = known[kind] = LeafSpec(self.typestr, (), dtype_name(dtype), dtype.itemsize)

            specs.append(spec)

        return specs

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        """Plan one piece of a few bytes, too few to count as a cost."""
        (number,) = self.chunk_buffers([leaf.value], leaf.spec)
        data = memoryview(number.tobytes())
        yield PiecePlan((), 0, len(data), 0, lambda: data)

    def chunk_buffers(self, values: Sequence[Any], spec: LeafSpec) -> Sequence[Any]:
        """The numbers as 0-d arrays."""
        numbers = [np.asarray(value, _STORED_AS.get(type(value))) for value in values]
        return [
            number if dtype_name(number.dtype) == spec.dtype else cast_to(number, spec.dtype)
            for number in numbers
        ]

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        """Accept numbers or number types of the stored kind; a numpy type must match the stored dtype.

        What `jax.eval_shape` makes of a Python number, a struct with a weak type, stands for Python's type.
        """
        return targets_by_kind(stored, likes, _wanted_type, _target)

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        """Return the numbers, each of the target's type, or a Python number if there was no target."""
        if leaves.shared is not None:
            arrays = list(shared_views(leaves.shared))
        else:
            arrays = [cast("HostRegion", leaf.target.regions[0]).array() for leaf in leaves]

        return [_number(array, wanted) for array, wanted in zip(arrays, leaves.details, strict=True)]


def _dtype_of(value: Any, info: ParamInfo) -> np.dtype[Any]:
    dtype = _STORED_AS.get(type(value))
    if dtype is not None:
        return dtype

    if not isinstance(value, np.generic):
        raise InvalidLeafError(
            info.key_path,
            f"a {type_name(value)} would come back as a plain number; convert it, or register a handler",
        )

    dtype = cast("np.dtype[Any]", cast("Any", value).dtype)
    if not storable(dtype_name(dtype)):
        raise InvalidLeafError(
            info.key_path, f"a scalar of dtype {dtype} cannot be stored; convert it to a number"
        )

    return dtype


def _wanted_type(like: Any) -> type:
    weak = like.dtype if getattr(like, "weak_type", False) is True else None
    return type_of(like) if weak is None else _OF_WEAK[weak.kind]


def _fits(wanted: type, dtype: np.dtype[Any]) -> bool:
    kind = _KIND.get(wanted)
    if kind is not None:
        return is_subtype(dtype, kind)

    # A concrete numpy type must be the dtype's scalar type, an abstract one such as np.floating a base of
    # that. C has two names for a 64-bit int, so numpy has two types for int64.
    return issubclass(dtype.type, wanted) or (wanted in _ALIASES and dtype == np.dtype(wanted))


def _target(stored: StoredLeaf, like: Any) -> Target | TreeDifference:
    wanted = None if like is None else _wanted_type(like)
    if stored.spec.shape != ():
        kind = "type" if stored.spec.shape is None else "shape"
        return different(kind, stored, "a number" if wanted is None else type_name(wanted))

    dtype = stored_dtype(stored)
    if wanted is not None and not _fits(wanted, dtype):
        return different("dtype", stored, type_name(wanted))

    # A few bytes of staging are not worth a lease.
    return Target((HostRegion((), dtype),), detail=wanted, packable=True)


def _number(array: npt.NDArray[Any], wanted: type | None) -> object:
    if wanted is None or wanted in _KIND:
        return array.item()

    number = array[()]

    return wanted(number) if wanted in _ALIASES else number


def _shortened(value: int) -> str:
    return str(value) if value.bit_length() <= 128 else f"of {value.bit_length()} bits"


@final
@dataclass(frozen=True, slots=True)
class StringHandler:
    """Stores a `str` in one of the layout's documents, without pieces or regions."""

    typestr: str = "string"

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        """Return the specs to store for `str`s and `np.str_`s.

        Raises:
            InvalidLeafError: If a value is of another subclass of `str`, whose type would be lost, or
                contains surrogates, which UTF-8 cannot encode.
        """
        specs: list[LeafSpec] = []
        for number, value in enumerate(values):
            if type(value) is not str and type(value) is not np.str_:
                raise InvalidLeafError(
                    infos[number].key_path,
                    f"a {type_name(value)} would come back as str; save str(value), or register a handler",
                )

            text = str(value)
            if not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise InvalidLeafError(
                        infos[number].key_path,
                        f"the string is no valid Unicode text ({error.reason}); save bytes as uint8",
                    ) from error

            specs.append(LeafSpec(self.typestr, text=text))

        return specs

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        return iter(())

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        """Accept string targets, or their type, for stored strings; the targets' texts do not matter."""
        return [
            different("type", stored[at], "string")
            if spec.text is None
            else Target(detail=np.str_ if likes is not None and type_of(likes[at]) is np.str_ else str)
            for at, spec in enumerate(stored.specs)
        ]

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        """Return the strings, each as `np.str_` if the target asks for that, else as `str`."""
        texts = (leaf.stored.spec.text for leaf in leaves)
        return [
            np.str_(text) if leaf.target.detail is np.str_ else text
            for leaf, text in zip(leaves, texts, strict=True)
        ]
