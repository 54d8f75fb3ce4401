"""Trees that are spread over the processes of a job, the same values whatever the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P: Any = PartitionSpec  # which jax does not annotate
ROWS, COLUMNS = 32, 48


def values() -> dict[str, Any]:
    """Return the values, on the host."""
    x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    return {
        "rows": x,
        "by_host": x + 1,
        "by_device": x + 2,
        "both": x * 2,
        "replicated": x[:16] - 3,
        "odd": np.arange(15, dtype=np.int32).reshape(3, 5),
        "zero_d": np.float32(3.5),
        "half": x.astype(jnp.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
        "nested": [{"deep": x[:, :8] * 5}],
    }


SPECS: dict[str, Any] = {
    "rows": P(("host", "device")),
    "by_host": P("host"),
    "by_device": P(None, "device"),
    "both": P("device", "host"),
    "replicated": P(),
    "odd": P(),
    "zero_d": P(),
    "half": P(None, ("host", "device")),
    "empty": P(),
    "nested": [{"deep": P("host", "device")}],
}


def mesh_of(n_hosts: int) -> Mesh:
    """Return a mesh with a row for each process."""
    return Mesh(np.array(jax.devices()).reshape(n_hosts, -1), ("host", "device"))


def spread(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Return the values as arrays over a mesh; no process needs any other for that."""

    def one(value: Any, spec: Any) -> jax.Array:
        return jax.make_array_from_callback(
            np.shape(value), NamedSharding(mesh, spec), lambda index: np.asarray(value)[index]
        )

    return jax.tree.map(one, tree, specs)


LARGE = {
    "rows": P(("host", "device")),
    "by_host": P("host"),
    "columns": P(None, ("host", "device")),
    "wide": P(None, ("host", "device")),
    "both": P("device", "host"),
    "replicated": P(),
}


def large_values() -> dict[str, Any]:
    """Return arrays that are large enough to count the bytes that are read of them."""
    x = np.arange(1536 * 768, dtype=np.float32).reshape(1536, 768)  # 3 processes can divide them, and 8
    return {name: (x.reshape(2, -1) if name == "wide" else x) + at for at, name in enumerate(LARGE)}


def distinct_bytes(tree: Any) -> int:
    """Return how many bytes the devices of this process hold, without what several of them hold."""
    return sum(
        sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
        for leaf in jax.tree.leaves(tree)
    )


def host_leaves() -> dict[str, Any]:
    """Return leaves that every process holds whole."""
    return {
        "numpy": np.arange(6.0),
        "number": 7,
        "text": "hello",
        "nothing": None,
        "local": jnp.arange(3, dtype=jnp.int32),
        "key": jax.random.key(3),
    }


def keys_over(mesh: Mesh) -> jax.Array:
    """Return typed PRNG keys that are spread over all processes."""
    data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 8)))
    over = NamedSharding(mesh, P(("host", "device")))
    raw = jax.make_array_from_callback(data.shape, over, lambda index: data[index])
    keys: jax.Array = jax.random.wrap_key_data(raw)
    return keys


def whole(mesh: Mesh) -> dict[str, Any]:
    """Return a tree with a leaf of every kind."""
    return {**spread(values(), SPECS, mesh), **host_leaves(), "keys": keys_over(mesh)}


def differences(found: Any, wanted: Any) -> list[str]:
    """Return the leaves that are not the same, as far as this process holds them."""
    structure: Any
    pairs, structure = jax.tree_util.tree_flatten_with_path(wanted)
    leaves, found_structure = jax.tree_util.tree_flatten(found)
    if found_structure != structure:
        return [f"{found_structure} is not {structure}"]

    return [
        jax.tree_util.keystr(path)
        for (path, want), leaf in zip(pairs, leaves, strict=True)
        if _held(leaf) != _held(want)
    ]


def _held(leaf: Any) -> object:
    if not isinstance(leaf, jax.Array):
        return (
            (leaf.dtype.name, leaf.shape, leaf.tobytes())
            if isinstance(leaf, np.ndarray)
            else (type(leaf), leaf)
        )

    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)

    shards = {str(shard.device): np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
    return leaf.dtype.name, leaf.shape, leaf.sharding, shards
