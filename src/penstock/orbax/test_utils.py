"""The module `test_utils` of Orbax's API, as far as its examples use it."""

from __future__ import annotations

__all__ = (
    "apply_function",
    "assert_array_equal",
    "assert_tree_equal",
    "assert_tree_same_structure",
    "create_sharded_array",
    "empty_directory",
    "erase_and_create_empty",
    "is_leaf",
    "print_directory",
    "register_type_handler",
    "replicate_sharded_array",
    "setup_pytree",
    "setup_sharded_pytree",
)

import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock import kernel
from penstock.embedding import prng_keys
from penstock.orbax import type_handlers
from penstock.orbax.leaf_args import ParamInfo
from penstock.orbax.tree import PyTree, to_flat_dict

_jax: Any = jax
_spec: Any = PartitionSpec


def is_leaf(x: Any) -> bool:
    """Return whether this is what the trees here have for leaves."""
    return isinstance(x, np.ndarray | Mesh | PartitionSpec | ParamInfo)


def create_sharded_array(arr: Any, mesh: Mesh, mesh_axes: PartitionSpec) -> Any:
    """Make a jax.Array of this sharding."""
    array: npt.NDArray[Any] = np.asarray(arr)

    def part(index: tuple[slice, ...]) -> npt.NDArray[Any]:
        return np.asarray(array[index])

    return _jax.make_array_from_callback(array.shape, NamedSharding(mesh, mesh_axes), part)


def replicate_sharded_array(arr: Any) -> Any:
    """Return the array with all of it on every device."""
    mesh = Mesh(np.asarray(_jax.devices()), ("x",))
    return _jax.device_put(arr, NamedSharding(mesh, _spec()))


def apply_function(tree: PyTree, function: Callable[[Any], Any]) -> PyTree:
    """Apply a compiled function to every leaf."""
    return _jax.tree.map(_jax.jit(function), tree)


def setup_pytree(add: int = 0) -> PyTree:
    """Make a small tree of NumPy arrays, with a number added to each."""
    return {
        "a": np.arange(8) + add,
        "b": np.arange(16) * 2 + add,
        "c": {
            "a": np.arange(8).reshape((2, 4)) * 3 + add,
            "e": np.arange(16).reshape((4, 4)) * 4 + add,
        },
    }


def setup_sharded_pytree(
    pytree: PyTree | None = None, reverse_devices: bool = False, devices: list[Any] | None = None
) -> tuple[PyTree, PyTree, PyTree]:
    """Make a small tree of jax.Arrays; return it with a tree of its meshes and one of its axes."""
    chosen = np.asarray(list(_jax.devices()) if devices is None else devices)
    if reverse_devices:
        chosen = chosen[::-1]

    line, square = Mesh(chosen, ("x",)), Mesh(chosen.reshape((2, -1)), ("x", "y"))
    meshes = {"a": line, "b": line, "c": {"a": square, "e": square}}
    both = _spec("x", "y")
    axes = {"a": _spec(None), "b": _spec("x"), "c": {"a": both, "e": both}}
    tree = setup_pytree() if pytree is None else pytree
    return _jax.tree.map(create_sharded_array, tree, meshes, axes, is_leaf=is_leaf), meshes, axes


def assert_array_equal(testclass: Any, v_expected: Any, v_actual: Any) -> None:
    """Assert that two leaves are equal, of one type and dtype, and cut alike."""
    if hasattr(v_expected, "dtype"):
        testclass.assertEqual(v_expected.dtype, v_actual.dtype)

    testclass.assertIsInstance(v_actual, type(v_expected))
    if isinstance(v_expected, jax.Array):
        if prng_keys.is_key(v_expected.dtype):
            v_expected, v_actual = jax.random.key_data(v_expected), jax.random.key_data(v_actual)

        expected, actual = v_expected.addressable_shards, v_actual.addressable_shards
        testclass.assertEqual(len(expected), len(actual))
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_array_equal(np.asarray(other.data), np.asarray(one.data))
    elif isinstance(v_expected, np.ndarray):
        np.testing.assert_array_equal(v_actual, cast("Any", v_expected))
    else:
        testclass.assertEqual(v_expected, v_actual)


def assert_tree_equal(testclass: Any, expected: PyTree, actual: PyTree) -> None:
    """Assert that two trees have the same keys, and equal leaves."""
    wanted, found = to_flat_dict(expected), to_flat_dict(actual)
    testclass.assertEqual(wanted.keys(), found.keys())
    for key, value in wanted.items():
        assert_array_equal(testclass, value, found[key])


def assert_tree_same_structure(testclass: Any, expected: PyTree, actual: PyTree) -> None:
    """Assert that two trees have the same nodes."""
    testclass.assertEqual(_jax.tree.structure(expected), _jax.tree.structure(actual))


def print_directory(directory: Any, level: int = 0) -> None:
    """Log the content of a directory, and of those in it."""
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(f"there is no directory {path}")
    for inner in sorted(path.rglob("*")):
        kernel.get_logger().info("orbax.directory", path="." * level + str(inner.relative_to(path)))


def erase_and_create_empty(directory: Any) -> Path:
    """Remove a directory with all that is in it, and make it again."""
    path = Path(directory)
    if path.exists():
        shutil.rmtree(path)

    path.mkdir(parents=True)
    return path


def empty_directory(directory: Any) -> None:
    """Remove all that is in a directory."""
    path = Path(directory)
    if path.exists():
        erase_and_create_empty(path)


@contextmanager
def register_type_handler(ty: Any, handler: Any, func: Callable[[Any], bool] | None) -> Generator[None]:
    """Have a type handled in another way while the context lasts, in the whole process."""
    before = type_handlers.get_type_handler(ty)
    type_handlers.register_type_handler(ty, handler, func=func, override=True)
    try:
        yield
    finally:
        type_handlers.register_type_handler(ty, before, func=func, override=True)
