"""The trees of the workloads, and what they are restored into."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

KIB, MIB = 2**10, 2**20
EVERY = 20  # leaf changes between two saves: 5 %


@dataclass
class State:
    """A tree with its leaves and their names, in flatten order."""

    tree: Any

    def __post_init__(self) -> None:
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(self.tree)
        self.leaves: list[Any] = [leaf for _, leaf in flat]
        self.names = [".".join(str(getattr(key, "key", key)) for key in path) for path, _ in flat]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)

    def with_leaves(self, leaves: list[Any]) -> State:
        """The same structure with other leaves."""
        return State(jax.tree_util.tree_unflatten(self.treedef, leaves))


def abstract(workload: str, scale: float) -> State:
    """The tree of a workload without its bytes: shapes, dtypes and shardings."""
    return State(SPECIFIED[workload](scale))


def build(workload: str, scale: float) -> State:
    """The tree of a workload."""
    specified = abstract(workload, scale)
    return specified.with_leaves(ready([filled(at, leaf) for at, leaf in enumerate(specified.leaves)]))


def filled(seed: int, leaf: Any) -> Any:
    """Normal numbers: what zstd can save of them is what it saves of real weights."""
    numbers = (
        np.random.default_rng(seed).standard_normal(leaf.shape, np.float32).astype(leaf.dtype, copy=False)
    )
    if isinstance(leaf, np.ndarray):
        return numbers
    if isinstance(leaf.sharding, SingleDeviceSharding):
        return jnp.array(numbers)  # a copy that is jax's own

    return jax.device_put(numbers, leaf.sharding)


def changed(state: State) -> State:
    """Every twentieth array anew; the others are the same objects."""
    return state.with_leaves(
        ready([leaf + 1 if at % EVERY == 0 else leaf for at, leaf in enumerate(state.leaves)])
    )


def into_jax(state: State) -> State:
    """As it was: shapes, dtypes and shardings, and no bytes."""
    return state.with_leaves([_spec(leaf.shape, leaf.dtype, leaf.sharding) for leaf in state.leaves])


def onto_four(state: State) -> State:
    """Sharded over four devices by the first axis."""
    sharding = _sharding(_mesh(4), "x")
    return state.with_leaves([_spec(leaf.shape, leaf.dtype, sharding) for leaf in state.leaves])


def into_numpy(state: State) -> State:
    """Arrays of numpy whose memory is never touched, so that they cost none."""
    return state.with_leaves([np.empty(leaf.shape, leaf.dtype) for leaf in state.leaves])


def ready(tree: Any) -> Any:
    """Wait until every array of it can be computed with."""
    return jax.block_until_ready(tree)  # type: ignore[no-untyped-call]  # jax's


def large(scale: float) -> Any:
    n_rows = int(32 * KIB * scale)
    return {f"array_{at}": _spec((n_rows, 1024)) for at in range(8)}


def transformer(scale: float) -> Any:
    """Eight layers of ten parameters, embeddings and a last norm; each with two moments."""
    width = int(768 * math.sqrt(scale)) // 16 * 16
    hidden, vocabulary = width * 8 // 3, width * 16
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    layer |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    layer |= dict.fromkeys(("norm_1", "norm_2", "scale"), (width,))
    shapes: Any = {f"layer_{at}": layer for at in range(8)}
    shapes |= {"embedding": (vocabulary, width), "norm": (width,)}

    def of(dtype: Any) -> Any:
        return jax.tree.map(
            lambda shape: _spec(shape, dtype), shapes, is_leaf=lambda node: isinstance(node, tuple)
        )

    moments = {"mu": of(ml_dtypes.bfloat16), "nu": of(np.float32)}
    return {"params": of(ml_dtypes.bfloat16), "opt": moments, "step": _spec((), np.int32)}


def kilobytes(n: int) -> Any:
    """Leaves of 1 KiB under a hundred modules."""
    leaf = _spec((256,))
    return {
        f"module_{module:03d}": {f"weight_{at:04d}": leaf for at in range(n // 100)} for module in range(100)
    }


def siblings(n: int) -> Any:
    """NumPy arrays of 64 bytes, side by side."""
    return {f"leaf_{at:07d}": np.empty(16, np.float32) for at in range(n)}


def one(scale: float) -> Any:
    return {"leaf": _spec((int(512 * KIB * scale), 1024))}


def sharded(scale: float) -> Any:
    shape = (int(16 * KIB * scale), 1024)
    line, grid = _mesh(8), _mesh(4, 2)
    shardings = (
        _sharding(line, "x"),
        _sharding(line, None, "x"),
        _sharding(grid, "x", "y"),
        _sharding(grid, ("x", "y")),
    )
    return {f"array_{at}": _spec(shape, np.float32, sharding) for at, sharding in enumerate(shardings)}


def shards(n: int) -> Any:
    """Leaves of 16 KiB under modules of ten, divided by rows among eight devices."""
    leaf = _spec((64, 64), np.float32, _sharding(_mesh(8), "x"))
    return {f"layer_{at:03d}": {f"weight_{each}": leaf for each in range(10)} for at in range(n // 10)}


def changing(scale: float) -> Any:
    return {f"array_{at:03d}": _spec((int(1280 * scale), 1024)) for at in range(100)}


SPECIFIED: dict[str, Callable[[float], Any]] = {
    "large": large,
    "half": lambda scale: large(scale / 2),
    "transformer": transformer,
    "small": lambda scale: kilobytes(int(10_000 * scale)),
    "first": lambda scale: kilobytes(int(10_000 * scale)),
    "many": lambda scale: kilobytes(int(100_000 * scale)),
    "million": lambda scale: siblings(int(10**6 * scale)),
    "one": one,
    "beside": lambda scale: large(scale * 3 / 16),
    "sharded": sharded,
    "shards-1000": lambda scale: shards(int(1000 * scale)),
    "shards-4000": lambda scale: shards(int(4000 * scale)),
    "changed": changing,
    "tiny": lambda scale: {name: _spec((at, 100)) for at, name in enumerate("abcde", 1)},
}


def _spec(
    shape: tuple[int, ...], dtype: Any = np.float32, sharding: Sharding | None = None
) -> jax.ShapeDtypeStruct:
    placed = SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)  # type: ignore[no-untyped-call]  # jax's


def _mesh(*shape: int) -> Mesh:
    devices: Any = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, ("x", "y")[: len(shape)])


def _sharding(mesh: Mesh, *axes: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax's
