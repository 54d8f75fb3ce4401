"""Safetensors as a checkpoint layout: read as one flat tree."""

from __future__ import annotations

__all__ = ("load_safetensors", "safetensors_metadata")

import os
from typing import Any

import jax
import numpy as np
from jax import sharding

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.dtypes import numpy_dtype
from penstock.kernel.config.config import Config
from penstock.kernel.errors import StructureMismatchError
from penstock.orbax.v1.common.path_types import Path
from penstock.orbax.v1.context.context import get_context
from penstock.orbax.v1.context.v1_options import SafetensorsOptions
from penstock.orbax.v1.operations.checkpoint_info import CheckpointMetadata
from penstock.orbax.v1.operations.locating import Found
from penstock.orbax.v1.trees.abstract_tree import mismatch

_jax: Any = jax
_sharding: Any = sharding


async def load_safetensors(found: Found, abstract: Any) -> Any:
    """Load a flat tree, as NumPy arrays unless asked otherwise; structs without a sharding on all devices."""
    context = get_context()
    options: dict[str, Any] = {}
    if abstract is not None:
        options = {"like": _jax.tree.map(_placed, abstract), "dtype": "like"}
        if context.pytree.loading.partial_load:
            options["on_unexpected"] = "skip"

    config, limit = _config(context.safetensors), context.memory.read_concurrent_bytes
    async with Checkpointer(config=config, memory_limit=limit) as checkpointer:
        try:
            return await checkpointer.restore(found.path, **options)
        except StructureMismatchError as error:
            raise mismatch([str(difference) for difference in error.differences]) from error


def _placed(leaf: Any) -> Any:
    if not isinstance(leaf, _jax.ShapeDtypeStruct) or leaf.sharding is not None:
        return leaf

    every = _sharding.Mesh(np.asarray(_jax.devices()), ("replica",))
    place = _sharding.NamedSharding(every, _sharding.PartitionSpec())
    return _jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _config(options: SafetensorsOptions) -> Config | None:
    options.check()
    if options.read_chunk_bytes is None:
        return None

    return Config.load().changed({"restore": {"piece_bytes": options.read_chunk_bytes}})


async def safetensors_metadata(found: Found, path: Path) -> CheckpointMetadata[Any]:
    """Say what arrays there are, by name."""
    async with Checkpointer() as checkpointer:
        about = await checkpointer.metadata(found.path)

    tree = {
        leaf.name: _jax.ShapeDtypeStruct(leaf.shape or (), numpy_dtype(leaf.dtype)) for leaf in about.leaves
    }
    return CheckpointMetadata(
        path,
        metadata=tree,
        commit_timestamp_nsecs=os.stat(found.path).st_mtime_ns,
        custom_metadata=about.custom_metadata,
    )
