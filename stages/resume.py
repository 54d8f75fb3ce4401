"""A save that another one can go on with: all places are decided in advance, and what is durable is recorded.

`Resume` follows `flatten`. It fixes the place of every chunk, so that the files do not depend on who was
faster, and sets aside the leaves that an interrupted save has written, once their bytes were compared with
their checksums. `Record` comes before `commit`. Now and then it makes durable what was written, and notes it
in a folder of the build, the journal. `EndRecord` removes that before the checkpoint is published.
"""

from __future__ import annotations

__all__ = ("JOURNAL", "RECORD_BYTES", "EndRecord", "Record", "Resume", "fixed_course", "why_not_resumed")

import base64
import hashlib
import json
import mmap
import os
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar, Final, final

import numpy as np
from anyio.from_thread import check_cancelled
from crc32c import crc32c

from penstock.kernel.codecs import AUTO
from penstock.kernel.errors import SpecError, StorageError
from penstock.kernel.messages.joint_plan import JointPlan
from penstock.kernel.messages.save import (
    Committed,
    FixedCourse,
    LeafBatch,
    Leaves,
    SavePlan,
    WrittenBatch,
    in_columns,
)
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.stores import Placement, ReadableFile, Store
from penstock.kernel.protocols.written import COLUMNS, Written, WrittenTable
from penstock.stages.messages.batching import arrived_bytes, plan_of
from penstock.stages.write import runs_of

JOURNAL: Final = "_PENSTOCK_JOURNAL"
"""The folder of a build with a document for each part of it that is durable."""

_ASIDE: Final = "aside"
"""In the journal: files of an interrupted save that nothing refers to."""

RECORD_BYTES: Final = 256 * 2**20
"""So much is written before it is made durable: little to do again, and little of the time of a disk."""

_READ_BYTES: Final = 4 * 2**20


@final
@dataclass(frozen=True, slots=True)
class Resume:
    """Takes `LeafBatch`es, yields them without the leaves that an interrupted save has written.

    Attributes:
        key: Returns what says what is saved and how. What was recorded under another one does not count. It
            is the same in all processes that save together. Blocking; called if it is needed.
        goes_on: Whether what an interrupted save left counts, and whether this one leaves something if it
            fails. Otherwise a save that fails removes what it wrote, and only one that was killed leaves it.

    Raises:
        SpecError: If it is to go on and cannot; see `why_not_resumed`.
    """

    messages: ClassVar[Messages] = {LeafBatch: LeafBatch}

    key: Callable[[], str]
    goes_on: bool = False

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        yield _Resumer(run, self.key, self.goes_on)


@final
class _Resumer:
    __slots__ = ("_goes_on", "_kept", "_key", "_plan", "_run")

    def __init__(self, run: SaveRun, key: Callable[[], str], goes_on: bool) -> None:
        self._run = run
        self._key = key
        self._goes_on = goes_on
        self._plan: SavePlan | None = None
        self._kept: frozenset[int] = frozenset()

    async def __call__(self, batch: LeafBatch, /) -> LeafBatch:
        if self._plan is None:
            self._plan = await self._begin(plan_of([batch]))

        leaves = in_columns(batch.leaves)
        if self._kept:
            left = [number for number, index in enumerate(leaves.indices) if index not in self._kept]
            leaves = leaves.part(left)

        return replace(batch, leaves=leaves, plan=self._plan)

    async def _begin(self, plan: SavePlan) -> SavePlan:
        run = self._run
        if plan.joint is not None:
            plan = replace(plan, joint=await run.threads.run(_compared, plan.joint, self._key))

        problem = _problem(run, plan)
        if problem is not None:
            if self._goes_on:
                raise SpecError(f"{run.path}: {problem}, so that nothing can go on with it")

            return plan

        key = await run.threads.run(_key_of, self._key, plan)
        course = await run.threads.run(fixed_course, run, plan, key)
        if not self._goes_on:
            return replace(plan, course=course)

        run.workspace.keep(JOURNAL)
        await run.workspace.open()
        kept, course = await run.threads.run(_take_up, run, plan, course)
        plan = replace(plan, course=course)
        if kept is None:
            return plan

        self._kept = frozenset(in_columns(kept.leaves).indices)
        run.progress.advance(len(self._kept), kept.nbytes)
        run.events.info("save.resumed", path=run.path, n_leaves=len(self._kept), nbytes=kept.nbytes)
        return replace(plan, kept=kept)


def _compared(joint: JointPlan, key: Callable[[], str]) -> JointPlan:
    """Return a joint plan that differs where the keys do: all processes save the same, in the same way."""
    found = hashlib.sha256(key().encode("utf-8", "surrogatepass")).digest()
    digest = hashlib.sha256(joint.digest + found).digest()
    return replace(joint, digest=digest, options={**joint.options, "made of": found.hex()})


def why_not_resumed(store: Store, n_processes: int, codecs: Iterable[str | None]) -> str | None:
    """Say why a save cannot be gone on with; None if it can.

    Args:
        store: Where it goes.
        n_processes: That save together.
        codecs: Of its leaves.
    """
    if store.directories is None or store.shared_files is None:
        return "a bucket gives each save a place that no other one has"
    if n_processes > 1:
        return "several processes save it together, and each knows its part alone"
    if AUTO in codecs:
        return "with the codec 'auto', a part of a leaf says whether it gets one"

    return None


def _problem(run: SaveRun, plan: SavePlan) -> str | None:
    if plan.kept is not None:
        return "it shares files with another checkpoint"

    return why_not_resumed(run.store, len(run.operation.processes), {spec.codec for spec in plan.specs})


def _key_of(key: Callable[[], str], plan: SavePlan) -> str:
    digest = hashlib.sha256(key().encode("utf-8", "surrogatepass"))
    for info, spec in zip(plan.infos, plan.specs, strict=True):
        digest.update(f"{info.name}\0{spec!r}\n".encode("utf-8", "surrogatepass"))

    return digest.hexdigest()


def fixed_course(run: SaveRun, plan: SavePlan, key: str) -> FixedCourse:
    """Decide where every chunk goes, as far as the layout leaves that open.

    Small leaves come first, those of whole cache lines before the others, as they are packed: so each pack
    is one range of a file. A file that has grown to the size that the store prefers is followed by another
    one, after the last chunk of a leaf. Only of leaves with a codec no place is known, as none of the lengths
    that encoded chunks have.
    """
    arrays = run.layout.arrays
    if arrays is None or not arrays.save_format.ocdbt:
        return FixedCourse(key)

    at, specs = run.store.placement, plan.specs
    asked = arrays.save_format.ocdbt_target_data_file_size
    file_bytes = at.file_bytes if asked is None else asked or sys.maxsize
    kinds: dict[int, tuple[int, int, int]] = {}
    for spec in specs:
        if id(spec) not in kinds:
            kinds[id(spec)] = _kind_of(spec, at)

    of_each = [kinds[id(spec)] for spec in specs]
    file, offset = [0] * len(specs), [0] * len(specs)
    stride = [kind[2] for kind in of_each]
    names: list[str] = []
    ends: list[int] = []
    filling: dict[str, int] = {}
    for index in sorted(range(len(specs)), key=lambda index: of_each[index][0]):
        spec = specs[index]
        if not spec.nbytes or spec.codec is not None:
            continue

        folder = _folder_of(run, plan, index)
        number = filling.get(folder)
        if number is None or ends[number] >= file_bytes:
            number = filling[folder] = len(names)
            inside = os.path.dirname(run.layout.data_file())
            name = hashlib.sha256(f"{key} {number}".encode()).hexdigest()[:32]
            names.append(os.path.join(folder, inside, name))
            ends.append(0)

        step = of_each[index][1]
        file[index] = number
        offset[index] = -(-ends[number] // step) * step
        ends[number] = offset[index] + stride[index] * (spec.n_chunks - 1) + spec.chunk_nbytes

    return FixedCourse(key, 0, names, ends, file, offset, stride)


def _kind_of(spec: LeafSpec, at: Placement) -> tuple[int, int, int]:
    """Return the rank of a leaf among the others, its alignment, and the bytes from chunk to chunk."""
    nbytes = spec.chunk_nbytes
    if nbytes >= at.page_from_bytes:
        return 2, at.page_bytes, -(-nbytes // at.page_bytes) * at.page_bytes
    if spec.nbytes % at.line_bytes == 0:
        return 0, at.line_bytes, nbytes

    return (1, 1, nbytes) if spec.nbytes < at.page_bytes else (2, at.line_bytes, nbytes)


def _folder_of(run: SaveRun, plan: SavePlan, index: int) -> str:
    folders = run.layout.folders
    if folders is None:
        return ""
    if folders.only_folder is not None:
        return folders.only_folder

    return folders.folder(Leaf(index, plan.infos[index], None, plan.specs[index], plan.handlers[index]))


def _take_up(run: SaveRun, plan: SavePlan, course: FixedCourse) -> tuple[WrittenBatch | None, FixedCourse]:
    """Return what is at the place and as it was written, with the leaves that are whole, and the course.

    Files that hold nothing of that are moved out of the way, and a new record says what is left. Blocking.
    """
    rows, n_records = _recorded(run, plan, course.key)
    rows = _in_whole_codes(_intact(run, plan, rows))
    arrived = arrived_bytes(plan.specs, [WrittenBatch((), WrittenTable.of(rows, plan.specs))])
    sizes = np.array(plan.sizes, np.int64)
    whole = (arrived == sizes) & (sizes > 0)
    # A smaller leaf is one piece, or is packed with others.
    goes_alone = sizes > run.limits.piece_bytes
    goes_alone |= np.array([spec.codec is not None for spec in plan.specs], np.bool_)
    in_parts = (arrived < sizes) & goes_alone
    rows = [row for row in rows if whole[row.leaf] or in_parts[row.leaf]]
    _set_aside(run, {row.file for row in rows})
    table = WrittenTable.of(rows, plan.specs)
    if n_records:
        n_records += 1
        _write_record(run, n_records, _encoded(course.key, [table], is_first=True))

    course = replace(course, n_records=n_records)
    if not rows:
        return None, course

    chosen: list[int] = np.flatnonzero(whole).tolist()
    leaves = Leaves(chosen, [plan.specs[at] for at in chosen], None, plan.infos, plan.handlers)
    done = _ranges_by_chunk([row for row in rows if in_parts[row.leaf]], plan)
    return WrittenBatch(leaves, table), replace(course, done=done)


def _in_whole_codes(rows: Iterable[Written]) -> list[Written]:
    """Return the rows without those of encoded chunks of which a part is absent: it is encoded anew."""
    found = list(rows)
    absent: dict[tuple[int, tuple[int, ...]], int] = {}
    for row in found:
        if row.coded is not None:
            absent[row.leaf, row.chunk] = absent.get((row.leaf, row.chunk), row.coded) - row.nbytes

    return [row for row in found if not absent.get((row.leaf, row.chunk))]


def _ranges_by_chunk(
    rows: Iterable[Written], plan: SavePlan
) -> dict[int, dict[tuple[int, ...], list[tuple[int, int]]]]:
    """Return the ranges of each chunk of each leaf, in order. Of an encoded chunk there is one, the whole."""
    found: dict[int, dict[tuple[int, ...], list[tuple[int, int]]]] = {}
    for row in sorted(rows, key=attrgetter("start")):
        ranges = found.setdefault(row.leaf, {}).setdefault(row.chunk, [])
        if row.coded is None:
            ranges.append((row.start, row.start + row.nbytes))
        elif not ranges:
            ranges.append((0, plan.specs[row.leaf].chunk_nbytes))

    return found


def _recorded(run: SaveRun, plan: SavePlan, key: str) -> tuple[list[Written], int]:
    """Return what the journal says is durable, each piece once, and the number of its last record."""
    store, folder = run.store, run.workspace.path(JOURNAL)
    if store.kind(folder) is None:
        return [], 0

    found: dict[tuple[int, tuple[int, ...], int], Written] = {}
    others = 0
    names = sorted(set(store.list_directory(folder)) - {_ASIDE})
    for name in names:
        record = _decoded(store.read_file(os.path.join(folder, name)))
        if record is None:  # the save ended while it was written
            continue
        if record["key"] != key:
            others += 1
            continue
        if record["first"]:
            found.clear()

        rows = [row for table in record["tables"] for row in _table_of(table, plan.specs)]
        found.update({(row.leaf, row.chunk, row.start): row for row in rows})

    if others:
        run.events.warning("save.begun_anew", path=run.path, n_records=others)

    return list(found.values()), int(names[-1]) if names else 0


def _intact(run: SaveRun, plan: SavePlan, rows: Iterable[Written]) -> Iterator[Written]:
    """Yield the pieces whose bytes are those that were recorded."""
    buffer = memoryview(mmap.mmap(-1, _READ_BYTES))  # aligned, for direct reads
    for file, there in groupby(sorted(rows, key=attrgetter("file", "offset")), attrgetter("file")):
        try:
            opened = run.store.open_data_file(run.workspace.path(file))
        except StorageError:
            continue

        try:
            for part in there:
                with suppress(StorageError):  # it is too short, or cannot be read: then it is written again
                    if _crc32c_of(opened, _ranges_of(run, plan, part), buffer) == part.crc32c:
                        yield part
        finally:
            opened.close()


def _ranges_of(run: SaveRun, plan: SavePlan, part: Written) -> Iterable[tuple[int, int]]:
    """Return the ranges of the file that a piece is in, in order: where each begins, and its bytes."""
    if run.layout.places is None:
        return [(part.offset, part.nbytes)]

    # There the offset is that of the leaf, which is whole and in C order.
    runs = runs_of(plan.specs[part.leaf], part.chunk, part.start, part.nbytes)
    return ((part.offset + at, hi - lo) for at, lo, hi in runs)


def _crc32c_of(file: ReadableFile, ranges: Iterable[tuple[int, int]], buffer: memoryview) -> int:
    found = 0
    for start, nbytes in ranges:
        for at in range(start, start + nbytes, len(buffer)):
            check_cancelled()
            read = buffer[: min(len(buffer), start + nbytes - at)]
            file.read_at(at, [read])
            found = crc32c(read, found)

    return found


def _set_aside(run: SaveRun, used: Collection[str]) -> None:
    """Move all files but the `used` ones into the journal, which goes before the checkpoint is published."""
    store, directories = run.store, run.store.directories
    assert directories is not None, "asked before"
    junk = [name for name in _files_below(store, run.workspace.path(""), "") if name not in used]
    if not junk:
        return

    aside = f"{JOURNAL}/{_ASIDE}"
    run.workspace.make_directory(aside)
    taken = {int(name) for name in store.list_directory(run.workspace.path(aside))}
    for number, name in enumerate(junk, max(taken, default=0) + 1):
        directories.rename(run.workspace.path(name), run.workspace.path(f"{aside}/{number}"))


def _files_below(store: Store, place: str, within: str) -> Iterator[str]:
    for name in store.list_directory(os.path.join(place, within)):
        inside = os.path.join(within, name)
        if inside == JOURNAL:
            continue
        if store.kind(os.path.join(place, inside)) == "directory":
            yield from _files_below(store, place, inside)
        else:
            yield inside


@final
@dataclass(frozen=True, slots=True)
class Record:
    """Passes `WrittenBatch`es on, and records now and then what is durable.

    Attributes:
        every_bytes: So much is written in between.
    """

    messages: ClassVar[Messages] = {WrittenBatch: WrittenBatch}

    every_bytes: int = RECORD_BYTES

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        batches: list[WrittenBatch] = []
        n_records = 0

        async def record(batch: WrittenBatch, /) -> WrittenBatch:
            nonlocal n_records
            course = None if batch.plan is None else batch.plan.course
            if course is None or not len(batch.written):
                return batch

            batches.append(batch)
            if sum([each.nbytes for each in batches]) >= self.every_bytes:
                n_records += 1
                tables = [each.written for each in batches]
                batches.clear()
                await run.threads.run(_record, run, course.n_records + n_records, course.key, tables)

            return batch

        yield record


def _record(run: SaveRun, number: int, key: str, tables: Sequence[WrittenTable]) -> None:
    """Make what was written durable, and then write a record of it. Blocking."""
    files = sorted({file for table in tables for file in table.files})
    for file in files:
        run.store.sync_file(run.workspace.path(file))
    for directory in sorted({os.path.dirname(file) for file in files}):
        run.store.sync_directory(run.workspace.path(directory))

    _write_record(run, number, _encoded(key, tables))


def _write_record(run: SaveRun, number: int, data: bytes) -> None:
    run.workspace.make_directory(JOURNAL)
    run.store.write_file(run.workspace.path(f"{JOURNAL}/{number:08}"), data)
    run.store.sync_directory(run.workspace.path(JOURNAL))
    run.store.sync_directory(run.workspace.path(""))


@final
@dataclass(frozen=True, slots=True)
class EndRecord:
    """Takes the `Committed`, removes the journal, and passes it on."""

    messages: ClassVar[Messages] = {Committed: Committed}

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        def end() -> None:
            folder = run.workspace.path(JOURNAL)
            if run.store.kind(folder) is not None:
                run.store.remove_tree(folder)
                run.store.sync_directory(run.workspace.path(""))

        async def forget(committed: Committed, /) -> Committed:
            await run.threads.run(end)
            return committed

        yield forget


def _encoded(key: str, tables: Iterable[WrittenTable], *, is_first: bool = False) -> bytes:
    """Return a record: its checksum, and a JSON text.

    Args:
        key: Of the save.
        tables: What is durable.
        is_first: Whether all earlier records are void.
    """
    document = {
        "version": 1,
        "key": key,
        "first": is_first,
        "tables": [
            {
                "files": list(table.files),
                "running": base64.b64encode(table.running).decode(),
                **{name: _as_text(getattr(table, name)) for name in COLUMNS},
            }
            for table in tables
        ],
    }
    data = json.dumps(document, separators=(",", ":")).encode()
    return b"%08x" % crc32c(data) + data


def _as_text(column: Any) -> str:
    return base64.b64encode(np.asarray(column, "<i8").tobytes()).decode()


def _decoded(data: bytes) -> dict[str, Any] | None:
    """Return what `_encoded` put into a record; None if it is not whole, or of another version."""
    if data[:8] != b"%08x" % crc32c(data[8:]):
        return None

    document: dict[str, Any] = json.loads(data[8:])
    return document if document.get("version") == 1 else None


def _table_of(table: Mapping[str, Any], specs: Sequence[LeafSpec]) -> WrittenTable:
    columns = {name: np.frombuffer(base64.b64decode(table[name]), "<i8") for name in COLUMNS}
    return WrittenTable(
        specs=specs, files=table["files"], running=base64.b64decode(table["running"]), **columns
    )
