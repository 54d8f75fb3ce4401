"""Arrays in the databases of single processes, found through one database of the whole tree."""

from __future__ import annotations

__all__ = ("MergeProcessFiles", "is_ocdbt_checkpoint", "merge_ocdbt_per_process_files")

import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import tensorstore as ts

from penstock.embedding import await_future, document_files, file_names, kernel
from penstock.orbax.background_work import in_thread
from penstock.orbax.serialization import OcdbtWriteOptions, get_ts_context, kvstore_spec

_ts: Any = ts  # its stubs use names that they do not define
_PROCESSES: Final = "ocdbt.process_*"
_METADATA: Final = re.compile(r"(?:^|/)(?:\.zarray|zarr\.json)$")
_CHUNKS: Final = (re.compile(r"(?:^|/)\d+(?:\.\d+)*$"), re.compile(r"(?:^|/)c(?:/\d+)*$"))
"""What follows the name of an array in the keys of its chunks: in zarr version 2, and in 3."""


def is_ocdbt_checkpoint(path: Any) -> bool:
    """Return whether the arrays of the tree at `path` are in a database."""
    return Path(path, file_names.MANIFEST).exists()


async def merge_ocdbt_per_process_files(
    directory: Any,
    ts_context: Any,
    use_zarr3: bool,
    enable_validation: bool = True,
    *,
    store_ocdbt_metadata_and_values_separately: bool = False,
) -> None:
    """Make the values in each process's own database visible in that of the whole tree.

    The databases are referred to, so they must stay. Does nothing without any.

    Args:
        directory: Of the tree.
        ts_context: The TensorStore context; one for all databases.
        use_zarr3: The zarr version of the arrays; both versions are validated.
        enable_validation: Whether to check that every array has its metadata and a chunk.
        store_ocdbt_metadata_and_values_separately: Not supported: must be False.

    Raises:
        ValueError: If an array lacks one of them; nothing is merged then.
        NotImplementedError: If an unsupported option is set.
    """
    if store_ocdbt_metadata_and_values_separately:
        raise NotImplementedError("the index and the values are kept in the same data files")

    directory = Path(directory)
    processes = sorted(await in_thread(lambda: list(directory.glob(_PROCESSES))))
    if not processes:
        return

    there = await in_thread(is_ocdbt_checkpoint, directory)
    writing = None if there else OcdbtWriteOptions()  # a database that is there has its own options
    parent = await _open(kvstore_spec(str(directory), writing=writing), ts_context)
    transaction = _ts.Transaction(atomic=True)
    target = parent.with_transaction(transaction)
    for process in processes:
        child = await _open(kvstore_spec(str(process)), ts_context)
        await await_future(child.experimental_copy_range_to(target))
    if enable_validation:
        _validate([key.decode() for key in await await_future(target.list())])

    await await_future(transaction.commit_async())


@final
@dataclass(frozen=True, slots=True)
class MergeProcessFiles:
    """A stage between `commit` and `finalize`: merges what type handlers wrote by TensorStore themselves."""

    @asynccontextmanager
    async def open(self, run: kernel.SaveRun, /) -> AsyncGenerator[kernel.Actor]:
        """Yield the actor of one save."""

        async def merge(committed: kernel.Committed, /) -> kernel.Committed:
            directory = run.workspace.temporary
            there = await run.threads.run(
                lambda: [at for at, _, _ in os.walk(directory) if _has_processes(at)]
            )
            for place in there:
                await merge_ocdbt_per_process_files(place, get_ts_context(), use_zarr3=False)
                await run.threads.run(document_files.record_changes, run.store, place)

            return committed

        yield merge


def _has_processes(directory: str) -> bool:
    return any(Path(directory).glob(_PROCESSES))


async def _open(spec: dict[str, Any], context: Any) -> Any:
    return await await_future(_ts.KvStore.open(_ts.KvStore.Spec(spec), context=context))


def _validate(keys: list[str]) -> None:
    chunks = {key: names for key in keys if (names := _arrays_of(key))}
    # A handler may have a name of its own for the metadata of arrays.
    named = [key.rpartition("/")[0] for key in keys if not _METADATA.search(key) and key not in chunks]
    described = {_METADATA.sub("", key) for key in keys if _METADATA.search(key)}.union(named)
    written = {next((name for name in names if name in described), names[-1]) for names in chunks.values()}
    if described != written:
        lacking = sorted(described - written)
        unknown = sorted(written - described)
        raise ValueError(
            f"arrays without a chunk: {lacking}; chunks without the metadata of an array: {unknown}"
        )


def _arrays_of(key: str) -> list[str]:
    """Name the arrays that a key may be a chunk of: `b/c/0` is one of `b/c`, or in zarr version 3 of `b`."""
    return [pattern.sub("", key) for pattern in _CHUNKS if pattern.search(key)]
