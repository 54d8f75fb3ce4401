"""The module `test_utils` of Orbax's API, as far as its examples and public programs use it."""

from __future__ import annotations

__all__ = (
    "apply_function",
    "assert_array_equal",
    "assert_tree_equal",
    "create_sharded_array",
    "create_tmp_directory",
    "erase_and_create_empty",
    "ocdbt_checkpoint_context",
    "print_directory",
    "setup_pytree",
)

import os
import shutil
import time
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
from penstock.orbax.item_files import place_of
from penstock.orbax.metadata import StepMetadata, encode_step_metadata, step_metadata_file_path
from penstock.orbax.multihost import is_primary_host, sync_global_processes
from penstock.orbax.step import is_tmp_checkpoint
from penstock.orbax.tree import PyTree, to_flat_dict
from penstock.orbax.type_handlers import (
    get_type_handler,
    register_standard_handlers_with_options,
    register_type_handler,
)

_jax: Any = jax
_spec: Any = PartitionSpec


def create_sharded_array(arr: Any, mesh: Mesh, mesh_axes: PartitionSpec) -> Any:
    """Make a jax.Array of this sharding."""
    array: npt.NDArray[Any] = np.asarray(arr)

    def part(index: tuple[slice, ...]) -> npt.NDArray[Any]:
        return np.asarray(array[index])

    return _jax.make_array_from_callback(array.shape, NamedSharding(mesh, mesh_axes), part)


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


def create_tmp_directory(
    tmp_dir: Any,
    final_dir: Any,
    *,
    primary_host: int | None = 0,
    active_processes: set[int] | None = None,
    barrier_sync_key_prefix: str | None = None,
    path_permission_mode: int | None = None,
    metadata_store: Any = None,
) -> Any:
    """Make a directory that looks as if a save had been interrupted; an unfinished one there is replaced.

    Args:
        tmp_dir: Its path.
        final_dir: The path that the save was for.
        primary_host: The process that makes it; None if each does.
        active_processes: Those that wait for it; None for all.
        barrier_sync_key_prefix: For the names of the barriers.
        path_permission_mode: Its permissions.
        metadata_store: Writes when the save began.

    Returns:
        The path.

    Raises:
        FileExistsError: If something that is finished is there.
    """
    path = place_of(tmp_dir)
    about = ".".join(
        filter(None, (barrier_sync_key_prefix, "create_tmp_directory", place_of(final_dir).name))
    )
    sync_global_processes(f"{about}.before", processes=active_processes)
    if is_primary_host(primary_host):
        if is_tmp_checkpoint(path):
            shutil.rmtree(path)

        path.mkdir(parents=True)  # which raises the FileExistsError
        if path_permission_mode is not None:
            os.chmod(path, path_permission_mode)
        if metadata_store is not None:
            begun = encode_step_metadata(StepMetadata(init_timestamp_nsecs=time.time_ns()))
            metadata_store.write(step_metadata_file_path(path), begun)

    sync_global_processes(f"{about}.after", processes=active_processes)
    return path


@contextmanager
def ocdbt_checkpoint_context(use_ocdbt: bool, ts_context: Any) -> Generator[None]:
    """Have standard handlers registered anew in the block, and those from before it afterwards.

    Args:
        use_ocdbt: Whether they are registered anew.
        ts_context: Ignored, as by `register_standard_handlers_with_options`.
    """
    types: tuple[Any, ...] = (int, float, bytes, np.number, np.ndarray, jax.Array)
    before = [(ty, get_type_handler(ty)) for ty in types]
    if use_ocdbt:
        register_standard_handlers_with_options(use_ocdbt=use_ocdbt, ts_context=ts_context)
    try:
        yield
    finally:
        for ty, handler in before:
            register_type_handler(ty, handler, override=True)
