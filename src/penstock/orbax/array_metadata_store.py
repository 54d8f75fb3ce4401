"""`array_metadatas/process_N`: how each jax.Array was cut, and the kind of each typed PRNG key.

A store of the caller's records them in a save in place of the layout, and a validator checks them.
"""

from __future__ import annotations

__all__ = (
    "RANDOM_KEY_IMPL",
    "ArrayMetadata",
    "SerializedArrayMetadata",
    "Store",
    "Validator",
    "recorded_by",
    "store_of",
    "validate",
)

import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Final, final

import jax

from penstock import Pipeline, SaveFormat, kernel
from penstock import handlers as built_in
from penstock.embedding import blocking, document_files, dtypes, file_names
from penstock.errors import SpecError
from penstock.orbax.future import in_thread
from penstock.orbax.item_files import check_document, handler_path

RANDOM_KEY_IMPL: Final = "random_key_impl"

PROCESS_PREFIX: Final = "process_"


@dataclass(frozen=True)
class ArrayMetadata:
    """A record of the way that one array was written."""

    param_name: str
    shape: tuple[int, ...]
    dtype: Any
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    use_ocdbt: bool
    use_zarr3: bool
    ext_metadata: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class SerializedArrayMetadata:
    """An `ArrayMetadata` as it is recorded."""

    param_name: str
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    ext_metadata: dict[str, Any] | None = None


class Store:
    """Writes and reads the document of one process.

    Args:
        primary_host: Has no effect: every process creates the directory if it is missing.
        write_timeout_secs: Has no effect: no process waits for another one.
    """

    def __init__(self, primary_host: int | None = 0, write_timeout_secs: int = 600) -> None:
        self._primary_host = primary_host
        self._write_timeout_secs = write_timeout_secs
        self._lock = Lock()  # leaves handled separately are recorded concurrently

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def set_primary_host(self, primary_host: int | None) -> None:
        """Has no effect."""
        self._primary_host = primary_host

    async def write(self, checkpoint_dir: Any, array_metadatas: Sequence[Any], process_index: int) -> None:
        """Record more arrays."""

        def write() -> None:
            with self._lock:
                _write(Path(checkpoint_dir), array_metadatas, process_index)

        await in_thread(write)

    async def read(self, checkpoint_dir: Any, process_index: int | None = None) -> Any:
        """Return what one process recorded, or each of them; None if there is nothing.

        Raises:
            ValueError: If there is no such directory.
        """
        return await in_thread(_read, Path(checkpoint_dir), process_index)


class Validator:
    """Checks what all processes recorded about a tree before the tree is published."""

    def validate_all_array_metadatas(self, array_metadatas: Mapping[int, Sequence[Any]]) -> None:
        """Compare the entries of the processes.

        Args:
            array_metadatas: By process.

        Raises:
            ValueError: If a process has none, or they differ.
        """
        first: dict[str, Any] | None = None
        for process, entries in array_metadatas.items():
            found = {entry.param_name: entry for entry in entries}
            if not found:
                raise ValueError(f"ArrayMetadata Store contains no metadata for process_index={process}.")
            if first is not None and found != first:
                names = sorted(name for name in {*first, *found} if first.get(name) != found.get(name))
                raise ValueError(f"ArrayMetadata Store contains different metadata of {names}: {process=}")

            first = found


def _write(directory: Path, found: Sequence[Any], process_index: int) -> None:
    path = directory / file_names.ARRAY_METADATAS / f"{PROCESS_PREFIX}{process_index}"
    store = built_in.LocalStore()
    store.make_directory(str(path.parent))
    if file_names.TEMPORARY_SUFFIX not in str(
        path
    ):  # the record of a tree that is being built may be of what this replaces
        check_document(str(path.parent), path.name)

    known = store.read_file(str(path)) if store.kind(str(path)) == "file" else b""
    entries: list[Any] = json.loads(known)["array_metadatas"] if known else []
    entries += [
        {
            "array_metadata": {
                "param_name": one.param_name,
                "write_shape": one.write_shape,
                "chunk_shape": one.chunk_shape,
                "ext_metadata": one.ext_metadata,
            }
        }
        for one in found
    ]
    document_files.rewrite_document(store, str(path), json.dumps({"array_metadatas": entries}).encode())


def _read(directory: Path, process_index: int | None) -> Any:
    if not directory.exists():
        raise ValueError(f"the directory of the checkpoint does not exist: {directory}")

    folder = directory / file_names.ARRAY_METADATAS
    if process_index is not None:
        path = folder / f"{PROCESS_PREFIX}{process_index}"
        return _entries(path) if path.exists() else None

    paths = sorted(folder.glob(f"{PROCESS_PREFIX}*")) if folder.exists() else []
    found: dict[int, list[SerializedArrayMetadata]] = {}
    for path in paths:
        number = path.name.removeprefix(PROCESS_PREFIX)
        if not number.isdigit():
            raise ValueError(f"the document does not exist: {path}")
        found[int(number)] = _entries(path)

    return found or None


def _entries(path: Path) -> list[SerializedArrayMetadata]:
    entries = [item["array_metadata"] for item in json.loads(path.read_text())["array_metadatas"]]
    return [
        SerializedArrayMetadata(
            param_name=entry["param_name"],
            write_shape=tuple(entry["write_shape"]),
            chunk_shape=tuple(entry["chunk_shape"]),
            ext_metadata=entry.get("ext_metadata"),
        )
        for entry in entries
    ]


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
    found = blocking.run_sync(store.read, handler_path(directory))
    if found is not None:
        validator.validate_all_array_metadatas(found)


def recorded_by(store: Any, form: SaveFormat, pipeline: Pipeline[kernel.SaveRun]) -> Pipeline[kernel.SaveRun]:
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
    async def open(self, run: kernel.SaveRun, /) -> AsyncGenerator[kernel.Actor]:
        """Yield the actor of one save."""

        async def record(committed: kernel.Committed, /) -> kernel.Committed:
            if self.arrays and run.operation.is_primary:  # the others did at their parts
                directory = run.workspace.path(run.folder)
                await self.write(run, directory)

            return committed

        yield record

    def note(self, plan: kernel.SavePlan) -> None:
        """Note the array metadata of a save."""
        for info, spec in zip(plan.infos, plan.specs, strict=True):
            if spec.typestr == "jax.Array" and spec.shape is not None:
                self.arrays.append(_metadata(info.name, spec, self.form))

    async def write(self, run: kernel.SaveRun, directory: str) -> None:
        """Have the store record them for this process, durably.

        Raises:
            SpecError: If the store cannot read what it was given.
        """
        index = run.process[0]
        folder = os.path.join(directory, file_names.ARRAY_METADATAS)
        await run.threads.run(_remove, os.path.join(folder, f"{PROCESS_PREFIX}{index}"))
        await self.store.write(handler_path(directory), self.arrays, index)
        found = await self.store.read(handler_path(directory), process_index=index)
        _check(self.arrays, found, directory, index)
        await run.threads.run(document_files.record_changes, run.store, directory)


@final
@dataclass(frozen=True, slots=True)
class _Collect:
    """Notes the arrays of the plan. A process whose part another one commits records them at once."""

    record: _Record
    messages: ClassVar[kernel.Messages] = {kernel.WrittenBatch: kernel.WrittenBatch}

    @asynccontextmanager
    async def open(self, run: kernel.SaveRun, /) -> AsyncGenerator[kernel.Actor]:
        """Yield the actor of one save."""

        async def collect(batch: kernel.WrittenBatch, /) -> kernel.WrittenBatch:
            if batch.plan is not None and not self.record.arrays:
                self.record.note(batch.plan)
                if self.record.arrays and not run.operation.is_primary:  # whose commit writes its own
                    await self.record.write(run, run.workspace.path(run.folder))

            return batch

        yield collect


def _remove(file: str) -> None:
    with suppress(FileNotFoundError):
        os.remove(file)


def _metadata(name: str, spec: kernel.LeafSpec, form: SaveFormat) -> ArrayMetadata:
    return ArrayMetadata(
        param_name=name,
        shape=spec.shape or (),
        dtype=dtypes.numpy_dtype(spec.dtype),
        write_shape=spec.chunk_shape if spec.write_shape is None else spec.write_shape,
        chunk_shape=spec.chunk_shape,
        use_ocdbt=form.ocdbt,
        use_zarr3=form.zarr == 3,
        ext_metadata={RANDOM_KEY_IMPL: spec.extended_dtype} if spec.extended_dtype else None,
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
