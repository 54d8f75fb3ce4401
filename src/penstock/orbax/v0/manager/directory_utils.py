"""The module `utils` of Orbax's API: what code for it imports from there."""

from __future__ import annotations

__all__ = (
    "TMP_DIR_SUFFIX",
    "all_leaves_are_placeholders",
    "any_checkpoint_step",
    "broadcast_one_to_all",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "construct_restore_args",
    "deserialize_tree",
    "from_flat_dict",
    "from_flattened_with_keypath",
    "fully_replicated_host_local_array_to_global_array",
    "get_key_name",
    "is_checkpoint_finalized",
    "is_dict_key",
    "is_empty_node",
    "is_empty_or_leaf",
    "is_gcs_path",
    "is_primary_host",
    "is_scalar",
    "is_sequence_key",
    "is_tmp_checkpoint",
    "leaf_is_placeholder",
    "leaf_placeholder",
    "name_from_leaf_placeholder",
    "pytree_structure",
    "reached_preemption",
    "serialize_tree",
    "step_from_checkpoint_name",
    "sync_global_devices",
    "sync_global_processes",
    "tmp_checkpoints",
    "to_flat_dict",
    "to_shape_dtype_struct",
    "tuple_path_from_keypath",
)

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
from penstock.handlers.formats.orbax.documents.file_names import (
    ARRAY_METADATAS,
    COMMIT_MARK,
    METADATA,
    SHARDING,
)
from penstock.orbax.v0.common.tree_utils import (
    PyTree,
    deserialize_tree,
    from_flat_dict,
    from_flattened_with_keypath,
    get_key_name,
    is_dict_key,
    is_empty_node,
    is_empty_or_leaf,
    is_sequence_key,
    serialize_tree,
    to_flat_dict,
    tuple_path_from_keypath,
)
from penstock.orbax.v0.manager.restore_utils import construct_restore_args, to_shape_dtype_struct

_jax: Any = jax
_multihost: Any = multihost_utils

TMP_DIR_SUFFIX: Final = TEMPORARY_SUFFIX
_PLACEHOLDERS: Final = ("PLACEHOLDER://", "AGGREGATED://")
_STEP: Final = re.compile(r"(?:.*_)?(\d+)")
_TEMPORARY_STEP: Final = re.compile(rf"(?:.*_)?(\d+){re.escape(TEMPORARY_SUFFIX)}.*")
_NO_LEAVES: Final = frozenset({METADATA, SHARDING, ARRAY_METADATAS})


def is_scalar(x: Any) -> bool:
    """Whether this is a number, of Python or NumPy."""
    return isinstance(x, int | float | np.number)


def leaf_is_placeholder(leaf: Any) -> bool:
    """Whether a leaf of an old msgpack file says that the value is stored on its own."""
    return isinstance(leaf, str) and leaf.startswith(_PLACEHOLDERS)


def leaf_placeholder(name: str) -> str:
    """Return what stands there for a leaf of this stored name."""
    return _PLACEHOLDERS[0] + name


def name_from_leaf_placeholder(placeholder: str) -> str:
    """Return the stored name that a placeholder is for.

    Raises:
        ValueError: If it is none.
    """
    for prefix in _PLACEHOLDERS:
        if placeholder.startswith(prefix):
            return placeholder.removeprefix(prefix)

    raise ValueError(f"{placeholder!r} is no placeholder of a leaf")


def all_leaves_are_placeholders(tree: PyTree) -> bool:
    """Whether no value is in the msgpack file itself."""
    return all(leaf_is_placeholder(leaf) for leaf in _jax.tree.leaves(tree))


def pytree_structure(directory: Any) -> PyTree:
    """Guess the structure of a tree by the names of what lies in its directory: nested dicts.

    Raises:
        ValueError: If one name is the beginning of another.
    """
    names = sorted(path.name for path in Path(directory).iterdir() if path.name not in _NO_LEAVES)
    return from_flat_dict({name: leaf_placeholder(name) for name in names}, sep=".")


def is_gcs_path(path: Any) -> bool:
    """Whether a path is in a bucket of Google's storage."""
    return str(path).startswith("gs://")


def is_tmp_checkpoint(path: Any) -> bool:
    """Whether there is a checkpoint that is being written, or was left half-written."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint: {path}")
    if not path.is_dir():
        return False

    return TEMPORARY_SUFFIX in path.name or (is_gcs_path(path) and not (path / COMMIT_MARK).exists())


def is_checkpoint_finalized(path: Any) -> bool:
    """Whether there is a complete checkpoint.

    Raises:
        FileNotFoundError: If there is nothing.
    """
    path = Path(path)
    return not is_tmp_checkpoint(path) and path.is_dir()


def tmp_checkpoints(checkpoint_dir: Any) -> list[str]:
    """Name what is half-written in a directory of steps."""
    directory = Path(checkpoint_dir)
    if not directory.exists():
        return []

    return [path.name for path in directory.iterdir() if is_tmp_checkpoint(path)]


def step_from_checkpoint_name(name: str) -> int:
    """Return the number of a step: of `12`, `step_12`, or of what is being written under such a name.

    Raises:
        ValueError: If it is no such name.
    """
    found = _STEP.fullmatch(name) or _TEMPORARY_STEP.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no name of a step")

    return int(found[1])


def checkpoint_steps_paths(checkpoint_dir: Any) -> list[Path]:
    """Return the directory of each complete step."""
    return list(_steps(Path(checkpoint_dir)))


def checkpoint_steps(checkpoint_dir: Any) -> list[int]:
    """Return the number of each complete step."""
    return [step_from_checkpoint_name(path.name) for path in _steps(Path(checkpoint_dir))]


def any_checkpoint_step(checkpoint_dir: Any) -> int | None:
    """Return the number of some complete step; None if there is none."""
    path = next(_steps(Path(checkpoint_dir)), None)
    return None if path is None else step_from_checkpoint_name(path.name)


def is_primary_host(primary_host: int | None) -> bool:
    """Whether this process is the one that is meant; with None, every one is."""
    return primary_host is None or primary_host == _jax.process_index()


def broadcast_one_to_all(in_tree: PyTree, is_source: bool | None = None) -> PyTree:
    """Give the values of one process, by default of the first, to all of the job."""
    source = _jax.process_index() == 0 if is_source is None else is_source
    return _multihost.broadcast_one_to_all(in_tree, is_source=source)


def sync_global_processes(
    name: str,
    *,
    timeout: int | None = None,
    processes: set[int] | None = None,
    barrier_sync_fn: Callable[..., Any] | None = None,
    record_event_name: str = "/jax/checkpoint/sync_global_devices_duration_sec",
) -> None:
    """Wait until every process of the job is here; one process has nothing to wait for.

    Args:
        name: Of the barrier; used once.
        timeout: Seconds, for `barrier_sync_fn`.
        processes: Those that are to be here, for `barrier_sync_fn`.
        barrier_sync_fn: What waits, instead of jax.
        record_event_name: Without effect: nothing is recorded.
    """
    if _jax.process_count() == 1 or (processes is not None and processes == {_jax.process_index()}):
        return
    if barrier_sync_fn is not None:
        barrier_sync_fn(key=name, timeout_ms=(timeout or 300) * 1000)
    else:
        _multihost.sync_global_devices(name)


sync_global_devices = sync_global_processes


def reached_preemption(step: int) -> bool:
    """Whether the job is to end after this step."""
    try:
        return bool(_multihost.reached_preemption_sync_point(step))
    except RuntimeError:  # jax was told not to look
        return False


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> jax.Array:
    """Make an array that is replicated over all devices of one that each process has on its own devices.

    Args:
        arr: As `pmap` returns it: perhaps with a first axis of one index for each device.
    """
    parts = sorted(cast("Any", arr).addressable_shards, key=lambda shard: next(iter(shard.data.devices())).id)
    shards = [shard.data for shard in parts]
    if shards[0].shape != arr.shape:
        shards = [shard[0] for shard in shards]

    shape = shards[0].shape
    mesh = jax.sharding.Mesh(np.array(_jax.devices()), axis_names=("x",))
    sharding = jax.sharding.NamedSharding(mesh, _jax.sharding.PartitionSpec())
    made: jax.Array = _jax.make_array_from_single_device_arrays(shape, sharding, shards)
    return made


def _steps(directory: Path) -> Iterator[Path]:
    if not directory.exists():
        return
    for path in directory.iterdir():
        if path.is_dir() and _STEP.fullmatch(path.name) and is_checkpoint_finalized(path):
            yield path
