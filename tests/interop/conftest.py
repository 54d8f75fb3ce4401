"""Trees that penstock and Orbax exchange, and the comparison of what arrives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock

WIDE = ("int64", "uint64", "float64", "complex128")
NUMPY = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64")
SMALL = (
    *("bfloat16", "int2", "int4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
BITS = {"bool": 1, "int2": 2, "int4": 4, "float4_e2m1fn": 4}


class Pair(NamedTuple):
    left: Any
    right: Any


def random_bits(name: str, shape: tuple[int, ...]) -> Any:
    """An array of any bits at all, NaNs with their payloads among them."""
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    rng = np.random.default_rng(len(name))
    if name not in BITS:
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)

    codes = rng.integers(0, 2 ** BITS[name], shape).astype(np.uint8)
    return codes.view(dtype) if name == "float4_e2m1fn" else codes.astype(np.int8).astype(dtype)


def place(array: Any, shape: tuple[int, ...], *axes: Any) -> Any:
    devices: Any = np.array(jax.devices()).reshape(shape)
    mesh = Mesh(devices, ("x", "y")[: len(shape)])
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))  # type: ignore[no-untyped-call]  # jax's


@functools.cache
def common_tree() -> Any:
    """All that Orbax can write, and so both can."""
    params = {"bias": jnp.zeros(3), "kernel": jnp.ones((2, 3))}
    opt = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params)
    square = np.arange(96, dtype=np.float32).reshape(8, 12)
    return {
        "": np.arange(2),
        "device": {name: jnp.asarray(random_bits(name, (3, 4))) for name in (*NUMPY, *SMALL)},
        "empties": [{}, [], (), None, Pair(None, {})],
        "host": {name: random_bits(name, (2, 3, 2)) for name in (*NUMPY, *SMALL, *WIDE)},
        "keys": [
            jax.random.key(1),
            jax.random.split(jax.random.key(2, impl="rbg"), 3),
            jax.random.key(3, impl="unsafe_rbg"),
            jax.random.PRNGKey(4),
        ],
        "names": {"a/b": jnp.ones(2), "a/b/0": np.ones(2), "ü ñ 漢": 1, "with space": "text", "x/y": "slash"},
        "opt": opt,
        "params": params,
        "scalars": (True, False, 0, -(2**63), 2**63 - 1, 1.5, -0.0, float("inf")),
        "sharded": [
            place(square, (2, 4), "x", "y"),
            place(square, (2, 4), "y"),
            place(square, (2, 4), None, ("x",)),
            place(square, (2, 4), ("x", "y")),
            place(square, (8,), "x"),
            place(square, (8,)),
            jax.device_put(square, jax.devices()[3]),
        ],
        "strings": ["", "a", "ünïcödé 漢字 \n\0"],
        "zero_d": [jnp.float32(2.5), np.array(3)],
    }


def ours_only() -> Any:
    """What Orbax reads and does not write."""
    return {"a": np.zeros((0, 3), np.int16), "b": jnp.zeros((2, 0)), "c": 1 + 2j, "d": np.ones(2)}


def plain(tree: Any) -> Any:
    """The same as dicts and lists, as it comes back without a target."""
    if isinstance(tree, Pair) or (hasattr(tree, "_fields") and tree):
        return {name: plain(value) for name, value in tree._asdict().items()}
    if isinstance(tree, dict):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return None
    if isinstance(tree, list | tuple) and tree:
        return [plain(value) for value in tree]

    return tree


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        host = np.asarray(jax.random.key_data(leaf) if keys else leaf)
        return "jax.Array", leaf.dtype, leaf.shape, host.tobytes()
    if isinstance(leaf, np.ndarray):
        return "np.ndarray", leaf.dtype, leaf.shape, leaf.tobytes()
    if isinstance(leaf, float | complex):
        return type(leaf), np.asarray(leaf).tobytes()

    return type(leaf), leaf


def assert_equal(found: Any, expected: Any) -> None:
    """Nodes, leaf types, dtypes and shardings equal, bit for bit; whether committed does not matter."""

    def flat(tree: Any) -> tuple[Any, Any]:
        return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)

    (leaves, treedef), (wanted, wanted_treedef) = flat(found), flat(expected)
    assert treedef == wanted_treedef
    for (path, leaf), (_, want) in zip(leaves, wanted, strict=True):
        name = jax.tree_util.keystr(path)
        assert bits(leaf) == bits(want), name
        if isinstance(want, jax.Array):
            assert leaf.sharding.is_equivalent_to(want.sharding, want.ndim), name


@pytest.fixture(scope="session")
def tree() -> Any:
    return common_tree()


@pytest.fixture(scope="session")
def tree_orbax_cannot_write() -> Any:
    return ours_only()


@pytest.fixture(scope="session")
def to_plain() -> Callable[[Any], Any]:
    return plain


@pytest.fixture(scope="session")
def compare() -> Callable[[Any, Any], None]:
    return assert_equal


@pytest.fixture(scope="session")
def ours() -> Iterator[Any]:
    """Penstock's blocking face, open."""
    with penstock.sync.Checkpointer() as checkpointer:
        yield checkpointer


@pytest.fixture(scope="session")
def by_penstock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The common tree, saved once."""
    path = tmp_path_factory.mktemp("penstock") / "ckpt"
    penstock.sync.save(path, common_tree(), custom_metadata={"lr": 0.5})
    return path
