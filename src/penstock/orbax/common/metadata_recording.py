"""Array metadata, recorded by a store of the caller and checked by a validator."""

from __future__ import annotations

__all__ = ("recorded_by", "store_of", "validate")

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, final

import jax

from penstock.blocking.background import run_sync
from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.orbax.documents.file_names import ARRAY_METADATAS
from penstock.handlers.formats.orbax.documents.recording import renew_record
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import SpecError
from penstock.kernel.messages.save import Committed, Leaf, WrittenBatch
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor
from penstock.kernel.storage.foreign_files import foreign_files
from penstock.orbax.common.array_metadata_store import RANDOM_KEY_IMPL, ArrayMetadata
from penstock.orbax.common.handler_paths import handler_path


def store_of(registry: Any) -> Any:
    """Return the array metadata store of a registry of type handlers; None if there is none."""
    try:
        return getattr(registry.get(jax.Array), "_array_metadata_store", None)
    except ValueError:  # no handler for arrays
        return None


def validate(validator: Any, store: Any, directory: Any) -> None:
    """Have a validator check what all processes recorded, if anything. Blocking.

    Args:
        validator: Has `validate_all_array_metadatas`, which is given the entries of each process.
        store: Reads them.
        directory: Of the tree.

    Raises:
        Exception: What the validator raises.
    """
    found = run_sync(store.read, handler_path(directory))
    if found is not None:
        validator.validate_all_array_metadatas(found)


def recorded_by(store: Any, form: SaveFormat, pipeline: Pipeline[SaveRun]) -> Pipeline[SaveRun]:
    """Return a pipeline for one save whose array metadata `store` records in place of the layout.

    Args:
        store: Has the methods `write` and `read` of Orbax's.
        form: How the arrays are stored.
        pipeline: Of the save.
    """
    arrays: list[Leaf] = []

    async def collect(batch: WrittenBatch, /) -> WrittenBatch:
        arrays.extend([leaf for leaf in batch.leaves if _is_recorded(leaf)])
        return batch

    pipeline = pipeline.insert_after("write", collect, called="collect_arrays")
    return pipeline.insert_after("commit", _Record(store, form, arrays), called="record_arrays")


@final
@dataclass(frozen=True, slots=True)
class _Record:
    """Replaces the array metadata of the layout by that of the store, and reads it back."""

    store: Any
    form: SaveFormat
    arrays: list[Leaf] = field(repr=False)

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def record(committed: Committed, /) -> Committed:
            if self.arrays:
                directory = run.workspace.path(run.folder)
                await run.threads.run(run.store.remove_tree, os.path.join(directory, ARRAY_METADATAS))
                await self._record(handler_path(directory))
                await run.threads.run(foreign_files(run.store, directory).sync_tree, directory)
                await run.threads.run(renew_record, run.store, directory)

            return committed

        yield record

    async def _record(self, directory: Any) -> None:
        self.arrays.sort(key=lambda leaf: leaf.index)
        await self.store.write(directory, [_metadata(leaf, self.form) for leaf in self.arrays], 0)
        found = await self.store.read(directory, process_index=0)
        _check(self.arrays, found, directory)


def _is_recorded(leaf: Leaf) -> bool:
    return leaf.spec.typestr == "jax.Array" and leaf.spec.shape is not None


def _metadata(leaf: Leaf, form: SaveFormat) -> ArrayMetadata:
    spec = leaf.spec
    return ArrayMetadata(
        param_name=leaf.info.name,
        shape=spec.shape or (),
        dtype=numpy_dtype(spec.dtype),
        write_shape=spec.chunk_shape if spec.write_shape is None else spec.write_shape,
        chunk_shape=spec.chunk_shape,
        use_ocdbt=form.ocdbt,
        use_zarr3=form.zarr == 3,
        ext_metadata={RANDOM_KEY_IMPL: spec.random_key_impl} if spec.random_key_impl else None,
    )


def _check(arrays: Sequence[Leaf], found: Any, directory: Any) -> None:
    """Refuse a store that cannot read what it was given.

    Raises:
        SpecError: If an array is missing. It is a ValueError.
    """
    if found is None:
        raise SpecError(
            f"No ArrayMetadata found for process_index=0 in the checkpoint directory: {directory}"
        )

    names = {one.param_name for one in found}
    absent = next((leaf for leaf in arrays if leaf.info.name not in names), None)
    if absent is not None:
        raise SpecError(
            f"No ArrayMetadata found for param_info: {absent.info.name!r}, directory: {directory}"
        )
