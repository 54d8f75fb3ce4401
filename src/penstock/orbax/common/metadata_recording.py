"""Array metadata, recorded by a store of the caller and checked by a validator."""

from __future__ import annotations

__all__ = ("recorded_by", "store_of", "validate")

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import jax

from penstock.blocking.background import run_sync
from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.orbax.file_names import ARRAY_METADATAS
from penstock.handlers.formats.orbax.sealed_documents import renew_record
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.errors import SpecError
from penstock.kernel.messages.save import Committed, SavePlan, WrittenBatch
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.storage.foreign_files import foreign_files
from penstock.orbax.common.array_metadata_store import PROCESS_PREFIX, RANDOM_KEY_IMPL, ArrayMetadata
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

    Of several processes that save together, each records all arrays under its own index.

    Args:
        store: Has the methods `write` and `read` of Orbax's.
        form: How the arrays are stored.
        pipeline: Of the save.
    """
    record = _Record(store, form)
    pipeline = pipeline.insert_after("write", _Collect(record), called="collect_arrays")
    return pipeline.insert_after("commit", record, called="record_arrays")


@final
@dataclass(frozen=True, slots=True)
class _Record:
    """Replaces the array metadata of the layout by that of the store, and reads it back."""

    store: Any
    form: SaveFormat
    arrays: list[ArrayMetadata] = field(default_factory=list[ArrayMetadata], repr=False)

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def record(committed: Committed, /) -> Committed:
            if self.arrays and not _is_worker(run):
                directory = run.workspace.path(run.folder)
                await self.write(run, directory)
                await run.threads.run(renew_record, run.store, directory)

            return committed

        yield record

    def note(self, plan: SavePlan) -> None:
        """Take the arrays of a save."""
        for info, spec in zip(plan.infos, plan.specs, strict=True):
            if spec.typestr == "jax.Array" and spec.shape is not None:
                self.arrays.append(_metadata(info.name, spec, self.form))

    async def write(self, run: SaveRun, directory: str) -> None:
        """Have the store record them for this process, durably.

        Raises:
            SpecError: If the store cannot read what it was given.
        """
        index = run.process[0] if run.operation is not None else 0
        folder = os.path.join(directory, ARRAY_METADATAS)
        await run.threads.run(_remove, os.path.join(folder, f"{PROCESS_PREFIX}{index}"))
        await self.store.write(handler_path(directory), self.arrays, index)
        found = await self.store.read(handler_path(directory), process_index=index)
        _check(self.arrays, found, directory, index)
        await run.threads.run(foreign_files(run.store, directory).sync_tree, directory)


@final
@dataclass(frozen=True, slots=True)
class _Collect:
    """Takes the arrays from the plan. A process whose part others commit records them now."""

    record: _Record
    messages: ClassVar[Messages] = {WrittenBatch: WrittenBatch}

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def collect(batch: WrittenBatch, /) -> WrittenBatch:
            if batch.plan is not None and not self.record.arrays:
                self.record.note(batch.plan)
                if self.record.arrays and _is_worker(run):
                    await self.record.write(run, run.workspace.path(run.folder))

            return batch

        yield collect


def _is_worker(run: SaveRun) -> bool:
    """Whether another process commits."""
    return run.operation is not None and not run.operation.is_primary


def _remove(file: str) -> None:
    with suppress(FileNotFoundError):
        os.remove(file)


def _metadata(name: str, spec: LeafSpec, form: SaveFormat) -> ArrayMetadata:
    return ArrayMetadata(
        param_name=name,
        shape=spec.shape or (),
        dtype=numpy_dtype(spec.dtype),
        write_shape=spec.chunk_shape if spec.write_shape is None else spec.write_shape,
        chunk_shape=spec.chunk_shape,
        use_ocdbt=form.ocdbt,
        use_zarr3=form.zarr == 3,
        ext_metadata={RANDOM_KEY_IMPL: spec.random_key_impl} if spec.random_key_impl else None,
    )


def _check(arrays: Sequence[ArrayMetadata], found: Any, directory: str, index: int) -> None:
    """Refuse a store that cannot read what it was given.

    Raises:
        SpecError: If an array is missing. It is a ValueError.
    """
    if found is None:
        raise SpecError(
            f"No ArrayMetadata found for process_index={index} in the checkpoint directory: {directory}"
        )

    names = {one.param_name for one in found}
    absent = next((one.param_name for one in arrays if one.param_name not in names), None)
    if absent is not None:
        raise SpecError(f"No ArrayMetadata found for param_info: {absent!r}, directory: {directory}")
