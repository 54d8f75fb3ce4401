"""A store made of bytes, so that leaf handlers can be tested without one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from penstock.errors import TreeDifference
from penstock.handlers.dtypes import numpy_dtype
from penstock.kernel import (
    KeyKind,
    Leaf,
    LeafHandler,
    LeafSpec,
    ParamInfo,
    PiecePlan,
    ReadLeaf,
    ReadLeaves,
    StoredLeaf,
    StoredRows,
    Target,
)
from penstock.kernel.protocols import Destination

# Both are untyped in jax.
P: Callable[..., PartitionSpec] = PartitionSpec
struct: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct

#: A sharding over devices that are not here.
ELSEWHERE = (
    '{"sharding_type": "NamedSharding", "shape": [2, 8], "axis_names": ["x", "y"], '
    '"axis_types": ["AxisType.Auto", "AxisType.Auto"], "partition_spec": ["x", null], "device_mesh": '
    '{"mesh": [[' + ", ".join(f'{{"id": {at}}}' for at in range(8)) + "], ["
    + ", ".join(f'{{"id": {at}}}' for at in range(8, 16)) + "]]}}"
)  # fmt: skip

INFO = ParamInfo(("opt", "mu"), (KeyKind.MAPPING, KeyKind.MAPPING), "['opt'].mu", "/ckpt")


@dataclass(frozen=True)
class Saved:
    """One leaf, stored: its spec and its bytes, chunk by chunk."""

    spec: LeafSpec
    chunks: dict[tuple[int, ...], bytes]

    @property
    def stored(self) -> StoredLeaf:
        return StoredLeaf(INFO, self.spec)

    def array(self) -> np.ndarray[Any, Any]:
        """The whole array, put together from its chunks by plain indexing."""
        assert self.spec.shape is not None
        array = np.zeros(self.spec.shape, numpy_dtype(self.spec.dtype))
        for index, data in self.chunks.items():
            chunk = np.frombuffer(data, array.dtype).reshape(self.spec.chunk_shape)
            array[_slices(index, self.spec.chunk_shape)] = chunk

        return array

    def fill(self, region: Destination) -> None:
        part = self.array()[tuple(slice(start, stop) for start, stop in region.bounds)]
        view = region.view()
        assert len(view) == region.nbytes == part.nbytes
        assert not view.readonly
        assert view.format == "B"
        view[:] = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


def plan(handler: LeafHandler, value: Any, piece_bytes: int = 1 << 20) -> tuple[LeafSpec, list[PiecePlan]]:
    (spec,) = handler.describe([value], [INFO], {})
    return spec, list(handler.pieces(Leaf(0, INFO, value, spec, handler), piece_bytes))


def save(
    handler: LeafHandler,
    value: Any,
    piece_bytes: int = 1 << 20,
    between: Callable[[], object] = lambda: None,
) -> Saved:
    """Store a leaf; check that its pieces tile its chunks exactly, in order, none too large.

    Args:
        handler: Of the leaf.
        value: The leaf.
        piece_bytes: As for `pieces`.
        between: What happens after the last piece is taken and before its bytes are read.
    """
    spec, plans = plan(handler, value, piece_bytes)
    taken = [made.take() for made in plans]
    between()
    chunks: dict[tuple[int, ...], bytes] = {}
    for made, data in zip(plans, taken, strict=True):
        assert len(data) == made.nbytes
        assert made.nbytes <= max(piece_bytes, spec.itemsize) or not made.cost
        assert (data.ndim, data.contiguous, data.format) == (1, True, "B")
        assert made.start == len(chunks.get(made.chunk, b""))
        assert made.chunk not in chunks or list(chunks)[-1] == made.chunk
        chunks[made.chunk] = chunks.get(made.chunk, b"") + data

    assert set(chunks) == set(_grid(spec))
    assert {len(data) for data in chunks.values()} <= {spec.chunk_nbytes}
    return Saved(spec, chunks)


def target(handler: LeafHandler, saved: Saved, *like: Any) -> Target | TreeDifference:
    (found,) = handler.targets(StoredRows([saved.stored], [0], [saved.spec]), like or None)
    return found.fresh() if isinstance(found, Target) else found


def restore(handler: LeafHandler, saved: Saved, *like: Any) -> Any:
    """Read a stored leaf back, with or without a target."""
    aim = target(handler, saved, *like)
    assert isinstance(aim, Target), aim
    for region in aim.regions:
        saved.fill(region)

    (value,) = handler.build(ReadLeaves.of([ReadLeaf(0, saved.stored, handler, aim)]))
    return value


def difference(handler: LeafHandler, saved: Saved, like: Any) -> TreeDifference:
    found = target(handler, saved, like)
    assert isinstance(found, TreeDifference)
    assert found.key_path == INFO.key_path
    return found


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _grid(spec: LeafSpec) -> Iterator[tuple[int, ...]]:
    if spec.nbytes and spec.shape is not None:
        chunks = zip(spec.shape, spec.chunk_shape or (1,) * len(spec.shape), strict=True)
        yield from itertools.product(*(range(size // chunk) for size, chunk in chunks))


def _slices(index: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at * size, (at + 1) * size) for at, size in zip(index, chunk, strict=True))


def mesh(*shape: int, types: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("x", "y", "z")[: len(shape)], axis_types=(types,) * len(shape))


def host_copy(array: jax.Array) -> object:
    """Where jax keeps the host copy that `np.asarray` makes of an array."""
    cached: object = array._npy_value  # type: ignore[attr-defined]  # private, and worth a look
    return cached
