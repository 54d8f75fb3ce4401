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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

KIB, MIB = 2**10, 2**20


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
        return sum(leaf.nbytes for leaf in self.leaves)

    def with_leaves(self, leaves: list[Any]) -> State:
        """The same structure with other leaves."""
        return State(jax.tree_util.tree_unflatten(self.treedef, leaves))


def random_array(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """Normal numbers: what zstd can save of them is what it saves of real weights."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.array(numbers.astype(dtype))  # a copy that is jax's own


def large(scale: float) -> Any:
    n = int(32 * MIB * scale)
    return {f"array_{at}": random_array(at, (n // 1024, 1024)) for at in range(8)}


def transformer(scale: float) -> Any:
    """Eight layers of ten parameters, embeddings and a last norm; each with two moments."""
    width = int(768 * math.sqrt(scale)) // 16 * 16
    hidden, vocabulary = width * 8 // 3, width * 16
    square, up, down = (width, width), (width, hidden), (hidden, width)
    layer = {"query": square, "key": square, "value": square, "out": square, "gate": up, "up": up, "down": down}
    layer |= {"norm_1": (width,), "norm_2": (width,), "scale": (width,)}
    shapes: Any = {f"layer_{at}": layer for at in range(8)}
    shapes |= {"embedding": (vocabulary, width), "norm": (width,)}

    def filled(offset: int, dtype: Any) -> Any:
        seeds = iter(range(offset, offset + 1000))
        return jax.tree.map(
            lambda shape: random_array(next(seeds), shape, dtype),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )

    bfloat16 = ml_dtypes.bfloat16
    moments = {"mu": filled(1000, bfloat16), "nu": filled(2000, np.float32)}
    return {"params": filled(0, bfloat16), "opt": moments, "step": jnp.array(7, jnp.int32)}


def kilobytes(n: int) -> Any:
    """Leaves of 1 KiB under a hundred modules."""
    numbers = np.random.default_rng(n).standard_normal((n, 256), np.float32)
    modules: Any = {f"module_{at:03d}": {} for at in range(100)}
    for at in range(n):
        modules[f"module_{at % 100:03d}"][f"weight_{at // 100:04d}"] = jnp.array(numbers[at])

    return modules


def one(scale: float) -> Any:
    return {"leaf": random_array(0, (int(512 * MIB * scale) // 1024, 1024))}


def sharded(scale: float) -> Any:
    n_rows = int(16 * KIB * scale)
    rows, grid = mesh((8,)), mesh((8,), (4, 2))
    specs = [(rows, ("x",)), (rows, (None, "x")), (grid, ("x", "y")), (grid, (("x", "y"),))]
    return {
        f"array_{at}": jax.device_put(random_array(at, (n_rows, 1024)), NamedSharding(*_placed(*spec)))
        for at, spec in enumerate(specs)
    }


def changing(scale: float) -> Any:
    n = int(1280 * scale)
    return {f"array_{at:03d}": random_array(at, (n, 1024)) for at in range(100)}


def changed(state: State) -> State:
    """Every twentieth array anew; the others are the same objects."""
    leaves = [leaf + 1 if at % 20 == 0 else leaf for at, leaf in enumerate(state.leaves)]
    jax.block_until_ready(leaves)
    return state.with_leaves(leaves)


BUILD: dict[str, Callable[[float], Any]] = {
    "large": large,
    "transformer": transformer,
    "small": lambda scale: kilobytes(int(10_000 * scale)),
    "many": lambda scale: kilobytes(int(100_000 * scale)),
    "one": one,
    "sharded": sharded,
    "changed": changing,
}


def build(workload: str, scale: float) -> State:
    """Make the tree of a workload."""
    state = State(BUILD[workload](scale))
    jax.block_until_ready(state.leaves)
    return state


def mesh(devices: tuple[int], shape: tuple[int, ...] | None = None) -> Mesh:
    shape = devices if shape is None else shape
    chosen: Any = np.array(jax.devices()[: devices[0]]).reshape(shape)
    return Mesh(chosen, ("x", "y")[: len(shape)])


def _placed(on: Mesh, axes: tuple[Any, ...]) -> tuple[Mesh, PartitionSpec]:
    return on, PartitionSpec(*axes)  # type: ignore[no-untyped-call]  # jax's


def into_jax(state: State) -> State:
    """As it was: shapes, dtypes and shardings, and no bytes."""
    return state.with_leaves([_abstract(leaf, leaf.sharding) for leaf in state.leaves])


def onto_four(state: State) -> State:
    """Sharded over four devices by the first axis."""
    sharding = NamedSharding(*_placed(mesh((4,)), ("x",)))
    return state.with_leaves([_abstract(leaf, sharding) for leaf in state.leaves])


def into_numpy(state: State) -> State:
    """Arrays of numpy whose memory is never touched, so that they cost none."""
    return state.with_leaves([np.empty(leaf.shape, leaf.dtype) for leaf in state.leaves])


def _abstract(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
