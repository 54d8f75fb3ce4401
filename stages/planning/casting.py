"""Restores leaves with a dtype, shape or type other than the stored one, where the options ask for it.

The leaf's own handler plans as if the leaf were stored with the wanted dtype and shape. The stored elements
are read into separate buffers, then cast, padded or cropped into the buffers of the handler (`Refit`). What a
function of the caller returned is brought to its target the same way (`maker`).
"""

from __future__ import annotations

__all__ = ("DtypeRule", "Refit", "kind_of", "maker", "refit_spec", "source_like", "why_not_cast")

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any, TypeAlias, cast, final

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, NamedSharding

from penstock.kernel.errors import SpecError, TreeDifference
from penstock.kernel.messages.restore import RestoreOptions
from penstock.kernel.protocols.leaf import KeyPath, LeafSpec, ParamInfo, StoredLeaf, StoredRows
from penstock.kernel.protocols.leaf_handlers import Leaf, LeafHandler, PartsHandler, ReadLeaf, ReadLeaves
from penstock.kernel.protocols.reads import Destination, Target
from penstock.kernel.protocols.written import PiecePlan
from penstock.stages.planning.key_patterns import pattern_fits
from penstock.stages.planning.leaf_sources import Function, call_foreign, described, rule_difference

Bounds: TypeAlias = tuple[tuple[int, int], ...]
_PAGE = 4096  # the alignment that direct reads need
_ALIGNED_FROM = 1 << 16
_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


@final
class DtypeRule:
    """The option `dtype`: decides which dtype each leaf gets.

    Args:
        dtype: None, a dtype for all arrays of its kind, `"like"`, a mapping from shell patterns over
            dotted names to dtypes, or a function of the key path.

    Raises:
        SpecError: If something given as a dtype is not one.
    """

    def __init__(self, dtype: Any) -> None:
        self._like = isinstance(dtype, str) and dtype == "like"
        self._patterns: list[tuple[str, np.dtype[Any] | None]] = []
        self._used: set[str] = set()
        self._function: Callable[[KeyPath], Any] | None = None
        self._all: np.dtype[Any] | None = None
        if isinstance(dtype, Mapping):
            items = cast("Mapping[object, Any]", dtype).items()
            self._patterns = [(_pattern(pattern), _dtype(wanted)) for pattern, wanted in items]
        elif callable(dtype) and not isinstance(dtype, type) and not hasattr(dtype, "dtype"):
            self._function = dtype
        elif not self._like:
            self._all = _dtype(dtype)

    def __call__(self, stored: StoredLeaf, info: ParamInfo, like: Any) -> np.dtype[Any] | None:
        """Return the dtype that a leaf of the result gets; None if it keeps the stored one."""
        of_like: Any = None if isinstance(like, type) else getattr(like, "dtype", None)
        if self._like:
            return _dtype(of_like) if isinstance(of_like, np.dtype) else None
        if self._function is not None:
            name = described("dtype", self._function)
            wanted: object = call_foreign(self._function, name, info.key_path, info.keys)
            return _dtype(wanted)
        if self._all is None:
            return self._by_pattern(info)

        # One dtype for all leaves is not meant for step counters or for Python numbers.
        is_number = stored.spec.typestr == "scalar" and of_like is None
        same_kind = not is_number and kind_of(np.dtype(stored.spec.dtype)) == kind_of(self._all)
        return self._all if same_kind else None

    @property
    def unused(self) -> list[str]:
        """The patterns that decided for no leaf."""
        return [pattern for pattern, _ in self._patterns if pattern not in self._used]

    def _by_pattern(self, info: ParamInfo) -> np.dtype[Any] | None:
        for pattern, wanted in self._patterns:
            if pattern_fits(pattern, info.name, info.keys, below=False):
                self._used.add(pattern)
                return wanted

        return None


def refit_spec(
    stored: StoredLeaf, info: ParamInfo, like: Any, options: RestoreOptions, dtype_rule: DtypeRule
) -> LeafSpec | TreeDifference:
    """Return the spec that a leaf is restored with: the stored one, or one with another dtype or shape.

    Typed keys, and leaves that are not arrays, stay as they are stored.

    Args:
        stored: The leaf on disk.
        info: Where it stands in the result.
        like: The target's leaf at that place, or None.
        options: `dtype` and `strict` are used here.
        dtype_rule: The option `dtype`.

    Returns:
        The spec, or a `TreeDifference` if the cast is impossible or would drop an imaginary part.
    """
    spec = stored.spec
    if spec.shape is None or spec.extended_dtype is not None:
        return spec

    shape: Any = None if options.strict or isinstance(like, type) else getattr(like, "shape", None)
    if shape is not None and len(shape) == len(spec.shape) and tuple(shape) != spec.shape:
        spec = replace(spec, shape=tuple(shape))

    stored_dtype = None if options.dtype is None else _known(spec.dtype)
    dtype = None if stored_dtype is None else dtype_rule(stored, info, like)
    if stored_dtype is None or dtype is None or dtype == stored_dtype:
        return spec

    problem = why_not_cast(stored_dtype, dtype)
    if problem:
        return TreeDifference(
            "dtype", info.key_path, f"{dtype.name}, asked for by dtype= ({problem}),", spec.dtype
        )

    return replace(spec, dtype=dtype.name, itemsize=dtype.itemsize)


@final
@dataclass(frozen=True, slots=True)
class Refit:
    """Wraps a `LeafHandler`, for leaves whose stored dtype or shape is not the wanted one.

    Values are cast as in C: 2.5 becomes 2, and the uint8 250 becomes the int8 -6. Zeros pad the
    end of each axis. Both happen on the host, before anything goes to a device.

    Args:
        inner: The handler.
        spec: The one that is wanted of its leaves.
    """

    inner: LeafHandler
    spec: LeafSpec

    @property
    def typestr(self) -> str:
        return self.inner.typestr

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        return self.inner.describe(values, infos, known)

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        return self.inner.pieces(leaf, piece_bytes)

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        """Decide what to read so that the handler can build the leaves as if they were stored as wanted.

        The buffers for the stored elements are freed once the value is built, and count as staging.
        """
        wanted = [replace(leaf, spec=self.spec) for leaf in stored]
        found = self.inner.targets(StoredRows(wanted, range(len(wanted)), [self.spec] * len(wanted)), likes)
        return [
            target if isinstance(target, TreeDifference) else _refitted(spec, self.spec, target)
            for spec, target in zip(stored.specs, found, strict=True)
        ]

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        """Fill the buffers of the handler and let it build the values."""
        return self.inner.build(ReadLeaves.of([self._filled(leaf) for leaf in leaves]))

    def parts(
        self, stored: StoredLeaf, target: Target, part_bytes: int, *, whole_chunks: bool
    ) -> Sequence[Target]:
        """Split a leaf as its handler does, if it can. Buffers for stored elements count in `part_bytes`."""
        if not isinstance(self.inner, PartsHandler):
            return ()

        own = _own(target)
        share = part_bytes * own.staging_bytes // max(1, target.staging_bytes)
        wanted = replace(stored, spec=self.spec)
        parts = self.inner.parts(wanted, own, max(1, share), whole_chunks=whole_chunks)
        return [_refitted(stored.spec, self.spec, part) for part in parts]

    def place(self, part: ReadLeaf) -> None:
        """Fill the buffers of the handler and let it place the part."""
        cast("PartsHandler", self.inner).place(self._filled(part))

    def join(self, part: ReadLeaf) -> Any:
        """Let the handler return the value."""
        return cast("PartsHandler", self.inner).join(self._as_wanted(part))

    def _filled(self, leaf: ReadLeaf) -> ReadLeaf:
        for region in leaf.target.regions:
            if isinstance(region, _Source):
                region.move(np.dtype(self.spec.dtype))

        return self._as_wanted(leaf)

    def _as_wanted(self, leaf: ReadLeaf) -> ReadLeaf:
        """Return the leaf as the wrapped handler expects it."""
        return ReadLeaf(leaf.index, replace(leaf.stored, spec=self.spec), self.inner, _own(leaf.target))


def _refitted(stored: LeafSpec, wanted: LeafSpec, target: Target) -> Target:
    """Return a target whose regions hold stored elements; those of `target` are filled from them."""
    regions = tuple([_source_of(region, stored, wanted) for region in target.regions])
    staging = sum([region.nbytes for region in regions if isinstance(region, _Source)])
    return Target(regions, target.staging_bytes + staging, target)


def _own(target: Target) -> Target:
    """Return the handler's own target, of which `target` was made by `_refitted`."""
    regions = [region.goal if isinstance(region, _Source) else region for region in target.regions]
    return replace(cast("Target", target.detail), regions=tuple(regions))


@final
class _Source:
    """A `Destination` for the stored elements of a region `goal`. It may be empty."""

    __slots__ = ("_lock", "_memory", "bounds", "dtype", "goal", "nbytes", "shape")

    def __init__(self, goal: Destination, bounds: Bounds, dtype: np.dtype[Any]) -> None:
        self.goal = goal
        self.bounds = bounds
        self.dtype = dtype
        self.shape = tuple([stop - start for start, stop in bounds])
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * dtype.itemsize
        self._lock = Lock()
        self._memory: npt.NDArray[np.uint8] | None = None

    def view(self) -> memoryview:
        return self._bytes().data

    def fresh(self) -> _Source:
        return _Source(self.goal.fresh(), self.bounds, self.dtype)

    def move(self, dtype: np.dtype[Any]) -> None:
        """Fill the goal with the elements read, cast to `dtype`, and pad it with zeros. Frees the bytes."""
        region = self.goal
        if not region.nbytes:
            return

        raw = np.frombuffer(region.view(), np.uint8)
        place = raw.view(dtype).reshape([stop - start for start, stop in region.bounds])
        if self.bounds != region.bounds:
            raw.fill(0)
        if self.nbytes:
            within = tuple(
                slice(start - first, stop - first)
                for (start, stop), (first, _) in zip(self.bounds, region.bounds, strict=True)
            )
            stored = self._bytes().view(self.dtype).reshape(self.shape)
            with np.errstate(all="ignore"):  # values that do not fit are cast as in C, without a warning
                np.copyto(place[within] if within else place, stored, casting="unsafe")

        self._memory = None

    def _bytes(self) -> npt.NDArray[np.uint8]:
        with self._lock:  # several threads read into it
            if self._memory is None:
                alignment = _PAGE if self.nbytes >= _ALIGNED_FROM else 1
                memory = np.empty(self.nbytes + alignment, np.uint8)
                start = -memory.ctypes.data % alignment
                self._memory = memory[start : start + self.nbytes]

            return self._memory


def _source_of(region: Destination, stored: LeafSpec, wanted: LeafSpec) -> Destination:
    """Return what to read for a region: itself if its elements need no conversion."""
    assert stored.shape is not None
    there = tuple(
        (min(start, size), min(stop, size))
        for (start, stop), size in zip(region.bounds, stored.shape, strict=True)
    )
    if stored.dtype == wanted.dtype and there == region.bounds:
        return region

    return _Source(region, there, np.dtype(stored.dtype))


def _pattern(pattern: object) -> str:
    if not isinstance(pattern, str):
        raise SpecError(f"dtype maps patterns over dotted names to dtypes, but {pattern!r} is not a string")

    return pattern


def _dtype(dtype: Any) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    try:
        known: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise SpecError(f"{dtype!r} is not a dtype: {error}") from error

    return known


def _known(name: str) -> np.dtype[Any] | None:
    try:
        return np.dtype(name)
    except TypeError:
        return None  # the handler raises the error


def kind_of(dtype: np.dtype[Any]) -> type | None:
    """Return the kind of a dtype, of which those of `ml_dtypes` are: booleans, integers and so on."""
    is_subtype: Any = cast("Any", jax.dtypes).issubdtype  # numpy's knows no bfloat16
    return next((kind for kind in _KINDS if is_subtype(dtype, kind)), None)


@lru_cache(maxsize=256)
def why_not_cast(stored: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    """Return why elements cannot be cast; empty if they can."""
    if kind_of(stored) is np.complexfloating and kind_of(wanted) is not np.complexfloating:
        return "which would drop the imaginary part"
    try:
        np.copyto(np.empty(1, wanted), np.zeros(1, stored), casting="unsafe")
    except (TypeError, ValueError) as error:
        return str(error)

    return ""


Abstract: TypeAlias = jax.Array | jax.ShapeDtypeStruct
_ARRAY_TYPES = (jax.Array, jax.ShapeDtypeStruct)


def source_like(spec: LeafSpec, like: Any) -> tuple[Any, bool, Callable[[Any], Any]]:
    """Decide what a stored leaf is restored as when a function makes a leaf of the result from it.

    The leaf keeps its shape and dtype. Where possible it gets the type and the sharding of the leaf that
    the function makes, so that the result is already on the right devices.

    Returns:
        The restore target; whether there is one (else the leaf is restored as it was saved); and a
        function to apply to the value before the caller's function gets it.
    """
    if spec.shape is None or spec.extended_dtype is not None:
        return None, False, _unchanged
    if isinstance(like, np.ndarray) or like is np.ndarray:
        return np.ndarray, True, _unchanged
    if isinstance(like, type):
        is_array = issubclass(like, _ARRAY_TYPES)
        return (jax.Array, True, _unchanged) if is_array else (None, False, _unchanged)
    if not isinstance(like, _ARRAY_TYPES):
        return None, False, _unchanged
    if isinstance(like, jax.Array) and not like.committed:
        return np.ndarray, True, _on_default_device

    sharding: Any = like.sharding
    if sharding is None or not _places(sharding) or not _divides(sharding, spec.shape):
        return jax.Array, True, _unchanged

    make: Any = jax.ShapeDtypeStruct  # its constructor is untyped
    return make(spec.shape, np.dtype(spec.dtype), sharding=sharding), True, _unchanged


def maker(
    function: Function, info: ParamInfo, like: Any, shared: Sequence[bool]
) -> Callable[[Sequence[Any]], object]:
    """Return a function that makes a leaf of the result from the values of its inputs.

    Args:
        function: The caller's function.
        info: Where the leaf stands in the result.
        like: The target's leaf at that place.
        shared: For each input, whether other functions get the same value. Such a NumPy array is made
            read-only.
    """

    def make(values: Sequence[Any]) -> object:
        for value, others_use_it in zip(values, shared, strict=True):
            if others_use_it and isinstance(value, np.ndarray):
                value.flags.writeable = False

        called = call_foreign(function.call, function.name, info.key_path, values)
        made: Any = _conformed(called, like, info.key_path)
        # A view would keep the whole buffer alive, and a view of a shared buffer could change later.
        sole = len(values) == 1 and made is values[0] and not shared[0]
        return made if sole or not _is_part(made, values) else made.copy()

    return make


def _is_part(made: Any, values: Sequence[Any]) -> bool:
    """Return whether a NumPy array may share memory with one of `values`."""
    if not isinstance(made, np.ndarray):
        return False

    arrays: list[Any] = [value for value in values if isinstance(value, np.ndarray)]
    return any(np.may_share_memory(cast("Any", made), array) for array in arrays)


def _conformed(value: object, like: Any, key_path: str) -> object:
    """Convert the result of a function to the target's type of array, with the target's sharding.

    Nothing is cast and nothing is reshaped. A value that is not an array is returned as it is.

    Returns:
        The value, or a `TreeDifference` if it does not fit.
    """
    wanted = like if isinstance(like, type) else type(like)
    if issubclass(wanted, (*_ARRAY_TYPES, np.ndarray)):
        if not isinstance(value, jax.Array | np.ndarray | np.generic):
            return _different(key_path, like, value)

        array: Any = cast("Any", value)
        if not isinstance(like, type) and (array.dtype, array.shape) != (like.dtype, like.shape):
            return _different(key_path, like, array)

        return np.asarray(array) if issubclass(wanted, np.ndarray) else _placed(array, like)

    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        return _different(key_path, like, value)

    return value


def _placed(array: Any, like: Any) -> jax.Array:
    put = cast("Any", jax).device_put
    wide = not isinstance(array, jax.Array) and array.dtype.itemsize >= 8
    with jax.enable_x64(True) if wide else nullcontext():  # else jax would narrow it to 32 bits
        sharding = None if isinstance(like, type) else like.sharding
        if sharding is None or not _places(sharding) or (isinstance(like, jax.Array) and not like.committed):
            return cast("jax.Array", array if isinstance(array, jax.Array) else put(array))

        return cast("jax.Array", put(array, sharding))


def _places(sharding: object) -> bool:
    return not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh))


def _divides(sharding: Any, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError):
        return False

    return True


def _unchanged(value: Any) -> Any:
    return value


def _on_default_device(value: Any) -> Any:
    return _placed(value, jax.Array)


def _different(key_path: str, like: Any, value: object) -> TreeDifference:
    return rule_difference(key_path, f"{_text(like)} in the target, {_text(value)} made by its function")


def _text(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__

    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    name = "jax.Array" if isinstance(value, jax.Array) else type(value).__name__
    return name if shape is None else f"{name} {dtype}{list(shape)}"
