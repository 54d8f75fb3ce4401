"""Writes a finished checkpoint again with another codec. It stays the same checkpoint, in other chunks.

Its documents are those of the source, but for what says where chunks are; and its mark says of what it was
made, so that both are known as one (`is_same_checkpoint`).
"""

from __future__ import annotations

__all__ = ("Encoding", "encode_checkpoint", "encoded_chunk")

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, cast, final

from crc32c import crc32c

from penstock.config.config import Config
from penstock.handlers.formats.orbax.checkpoint_documents import Origin, SealedDocuments, identity_in_mark
from penstock.handlers.formats.orbax.discovery import disk_mark
from penstock.handlers.formats.orbax.file_names import (
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    INTEGRITY,
    METADATA,
    SHARDING,
    STRINGS,
)
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.formats.orbax.storage_choice import CODED_CHUNK
from penstock.handlers.leaves.stored_value import ChosenChunks, SourceFiles, StoredValue, chunks_there
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.handlers.stores.publishing.reading import Reading, Snapshots, read_unchanged
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.protocols.coordinator import SingleProcessCoordinator, SoleOperation
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.leaf import LeafSpec, StoredLeaf
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import DiskMark
from penstock.rewriting.rewriting import Rewriting
from penstock.rewriting.stored_items import ItemsReader, stored_value
from penstock.verification.copying import lengths_below

_KEPT: Final = frozenset({CHECKPOINT_METADATA, METADATA, SHARDING, STRINGS})
"""Documents that say nothing of chunks."""


@final
@dataclass(frozen=True, slots=True)
class Encoding:
    """An order to encode a checkpoint: which one, where it goes, and how. Another process can be sent it."""

    path: str  #: of a finished checkpoint
    destination: str
    form: SaveFormat  #: of what is written
    limit_bytes: int  #: of host memory
    overwrite: bool = False
    chunk_bytes: int | None = None
    """Of an encoded chunk, about: the same for all parts of a checkpoint. By default as the memory allows."""
    processes: Sequence[int] = ()  #: who see all of it, and write a share each; none if one writes all of it
    process: int = 0  #: which of them writes
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of a `Config`, as nested tables: how stores are reached, and how codecs are chosen."""

    @staticmethod
    def options_of(config: Config) -> Mapping[str, Any]:
        """Return the options that an encoding takes over from those of a manager."""
        chosen = config.save.stage_options.get("encode", {})
        encode = {name: getattr(value, "value", value) for name, value in chosen.items()}
        store = _table(dataclasses.asdict(config.store))
        return {"store": store, "save": {"encode": encode}} if encode else {"store": store}

    @property
    def config(self) -> Config:
        """The options of the save."""
        given = {name: table for name, table in self.options.items() if name != "save" or self.is_coded}
        return Config(telemetry=replace(Config().telemetry, keep_reports=0)).changed(given)

    @property
    def is_coded(self) -> bool:
        """True if it gets a codec; otherwise what has one loses it."""
        return self.form.leaf_codec is not None

    @property
    def part(self) -> DiskMark | None:
        """The mark of the share that is written; None if it is no share."""
        return DiskMark(self.process, tuple(self.processes), "shared") if self.processes else None

    def told(self) -> bytes:
        """Return it as a line of text."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def heard(cls, line: bytes) -> Encoding:
        """Read what `told` made."""
        found: dict[str, Any] = json.loads(line)
        form = SaveFormat(**found.pop("form"))
        return cls(form=form, **found)


def _table(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is None, for which no table has a word."""
    return {
        name: _table(cast("Mapping[str, Any]", value)) if isinstance(value, dict) else value
        for name, value in options.items()
        if value is not None
    }


def encoded_chunk(limit_bytes: int) -> int:
    """Return the bytes of an encoded chunk where so much memory may be used: several are made at once."""
    return min(CODED_CHUNK, max(limit_bytes // 4, 1))


async def encode_checkpoint(encoding: Encoding, source: Store, target: Store) -> int:
    """Write a checkpoint again with another codec; it appears in one step, durable.

    Of the part of one process that becomes a part again, and says so.

    Leaves are read as they are stored, piece by piece, and no handler is asked. Every recorded checksum is
    compared on the way. While it is read, no penstock on this machine deletes the source.

    Args:
        encoding: Says what and how.
        source: Where it is.
        target: Where it goes.

    Returns:
        The bytes of all files of the result.

    Raises:
        CorruptCheckpointError: If the source is damaged; an `UnsupportedFormatError` if it cannot be encoded.
        SpecError: If it has what no other than its handler can read, or something is at the destination.
        StorageError: If a medium refuses.

    Cancellation:
        Nothing is left at the destination.
    """
    threads = Threads()
    once = partial(_encode, encoding, target, threads)
    return await read_unchanged(source, threads, encoding.path, once, views=Snapshots())


async def _encode(encoding: Encoding, target: Store, threads: Threads, source: Reading) -> int:
    final, form, config = encoding.destination, encoding.form, encoding.config
    mark = encoding.part or await threads.run(disk_mark, source.store, encoding.path)
    at_once = target.directories is not None
    memory = MemoryRegulator(encoding.limit_bytes)
    rewriting = Rewriting(
        store=target,
        config=config,
        memory=memory,
        coordinator=SingleProcessCoordinator() if mark is None else _PartCoordinator(mark),
        overwrite=encoding.overwrite and (True if at_once else "delete-first"),
        save_format=form,
        source=source.store,
    )
    async with rewriting.source_files(threads) as files:
        choice = chunks_there if encoding.part is None else _Share(encoding.part)
        take = partial(_taken, files, None if mark is None else choice)
        reader = ItemsReader(source.store, take)
        items = await threads.run(reader.read, encoding.path, None)
        scheme = scheme_of(final)
        layout = OrbaxLayout(
            form,
            encoding.chunk_bytes or encoded_chunk(encoding.limit_bytes),
            plain_chunk=None if scheme is None else config.store.of_scheme(scheme).file_bytes,
            tree_custom_metadata=items.tree_custom_metadata,
            origin=await threads.run(_origin, source.store, encoding.path, form),
        )
        report = await rewriting.save(source, final, items, layout)

    try:
        return sum((await threads.run(lengths_below, target, final)).values())
    except StorageError:  # it is there, and that its length is not known is no failure
        return report.nbytes


@final
class _PartOperation(SoleOperation):
    """The save of the part of one process, without the others: what they write is somewhere else."""

    is_local = True
    is_alone = False

    __slots__ = ("identity",)

    def __init__(self, path: str, mark: DiskMark) -> None:
        super().__init__(path, mark.process)
        self.processes = mark.processes
        self.identity = mark.save


@final
class _PartCoordinator(SingleProcessCoordinator):
    """The `Coordinator` of a process that saves such a part."""

    __slots__ = ("_mark", "process_index", "processes")

    def __init__(self, mark: DiskMark) -> None:
        self._mark = mark
        self.process_index, self.processes = mark.process, mark.processes

    def operation(self, path: str, *, is_local: bool = False) -> SoleOperation:
        return _PartOperation(path, self._mark)


def _taken(
    files: SourceFiles, chosen: ChosenChunks | None, _: str, opened: StoredCheckpoint, leaf: StoredLeaf
) -> object:
    value = stored_value(files, opened, leaf)
    return replace(value, chosen=chosen) if isinstance(value, StoredValue) else value


@final
class _Share:
    """Chooses the chunks of one of several processes: some of a leaf of many, or all of some leaves.

    Args:
        mark: Whose share it is.
    """

    def __init__(self, mark: DiskMark) -> None:
        self._rank, self._count = mark.processes.index(mark.process), len(mark.processes)

    def __call__(self, value: StoredValue, spec: LeafSpec) -> Sequence[int]:
        n, rank, count = spec.n_chunks, self._rank, self._count
        if n >= count:
            return range(n * rank // count, n * (rank + 1) // count)

        return range(n if crc32c(value.stored.info.name.encode()) % count == rank else 0)


def _origin(store: Store, path: str, form: SaveFormat) -> Origin:
    """Read what of a checkpoint stays as it is. Blocking.

    Raises:
        CorruptCheckpointError: If a document of it is damaged.
    """
    mark = store.read_files([os.path.join(path, COMMIT_MARK)])[0]
    stored_so = json.dumps({"use_ocdbt": form.ocdbt, "use_zarr3": form.zarr == 3})[1:-1].encode()
    documents: dict[str, bytes] = {}
    digests: dict[str, Mapping[str, bytes]] = {}
    files = lengths_below(store, path)
    for directory in [os.path.dirname(name) for name in files if os.path.basename(name) == INTEGRITY]:
        at = os.path.join(path, directory)
        sealed = SealedDocuments.open(store, at, store.list_directory(at))
        digests[directory] = sealed.recorded.digests
        for name in sealed.recorded.documents:
            if os.path.basename(name) in _KEPT:
                data = sealed.read(name)
                if os.path.basename(name) != METADATA or stored_so in data:
                    documents[os.path.join(directory, name)] = data

    return Origin(None if mark is None else identity_in_mark(mark), documents, digests)
