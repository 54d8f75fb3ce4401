"""Leaves that rules made are made again, of the source that is recorded, and compared: nothing is written.

A conversion by rules records the path of its source, the rules, and for each leaf of what and by which of
them it was made, with the digests that the source had of that.
"""

from __future__ import annotations

__all__ = ("RemadeReport", "made_record", "recorded_digests", "remake")

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast, final

from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue, StoredValueHandler
from penstock.handlers.stores.publishing.reading import Reading, read_unchanged
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PenstockError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.stores import Store
from penstock.kernel.rules import MADE_BY, parse_rules
from penstock.rewriting.stored_items import ItemsReader, stored_value
from penstock.stages.files import closing
from penstock.stages.pytree.flattening import flatten_tree
from penstock.stages.rules.derived import DerivedCheckpoint

_PIECE_BYTES: Final = 16 * 2**20
_MOST_GATHERED: Final = 64 * 2**20


@final
@dataclass(frozen=True, slots=True)
class RemadeReport:
    """The findings about the leaves of one checkpoint that rules made."""

    path: str
    source: str  #: as it was recorded
    n_rules: int
    same: tuple[str, ...] = ()  #: leaves that the rules make of the source now, bit for bit
    differing: tuple[str, ...] = ()  #: leaves that they do not, of what may be the same source
    changed: tuple[str, ...] = ()  #: leaves whose source has another digest than it had
    nbytes: int = 0  #: of what was compared
    problem: str | None = None  #: why nothing was made again; None if it was


def made_record(custom_metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what is recorded of a conversion by rules; None if nothing is that can be read."""
    record: object = (custom_metadata or {}).get(MADE_BY)
    if not isinstance(record, dict):
        return None

    known = cast("dict[str, Any]", record)
    kinds = {"source": str, "rules": list, "leaves": dict}
    return known if all(isinstance(known.get(name), kind) for name, kind in kinds.items()) else None


def recorded_digests(checkpoint: StoredCheckpoint, names: Iterable[str]) -> dict[str, str | None]:
    """Return a digest of each stored leaf, from what is recorded of it; None where nothing is. Blocking.

    It is the SHA-256 of the bytes, if a save recorded that, and else of their checksums, which is as good for
    telling whether a leaf is still the same.
    """
    numbers = {leaf.info.name: number for number, leaf in enumerate(checkpoint.leaves)}
    wanted = [name for name in dict.fromkeys(names) if name in numbers]
    found: dict[str, str | None] = dict.fromkeys(names)
    parts = checkpoint.parts([numbers[name] for name in wanted], list(range(len(wanted))))
    for name, rows in zip(wanted, parts, strict=True):
        sums = sorted((row.chunk, row.start, row.nbytes, row.crc32c) for row in rows)
        if sums:
            found[name] = f"crc32c {hashlib.sha256(repr(sums).encode()).hexdigest()}"
        if name in checkpoint.digests:
            found[name] = checkpoint.digests[name].hex()

    return found


async def remake(
    stores: tuple[Store, Store],
    threads: Threads,
    memory: MemoryRegulator,
    path: str,
    source: str,
    record: Mapping[str, Any],
) -> RemadeReport:
    """Make the leaves of a checkpoint again, piece by piece, and compare them with it.

    Args:
        stores: Of the checkpoint, and of the source.
        threads: For blocking calls.
        memory: The budget.
        path: Of the checkpoint.
        source: Where the source is now.
        record: What `made_record` found in the checkpoint.

    Returns:
        Also of a source that is not there, or that the rules do not fit: the report says it.

    Raises:
        PenstockError: If the checkpoint itself cannot be read.
    """
    report = RemadeReport(path, source, len(record["rules"]))
    here, there = stores
    try:
        if await threads.run(there.kind, source) is None:
            return replace(report, problem="it is not there")

        async def compare(_: Reading) -> RemadeReport:
            gathered = max(1, min(memory.limit // 8, _MOST_GATHERED))
            files = [SourceFiles(store, gather_bytes=gathered) for store in stores]
            async with closing(threads, lambda: files):
                return await _compared(report, files, threads, memory, record, stores)

        return await read_unchanged(there, threads, source, compare)
    except PenstockError as error:
        if await threads.run(here.kind, path) is None:
            raise

        return replace(report, problem=str(error))


async def _compared(
    report: RemadeReport,
    files: Sequence[SourceFiles],
    threads: Threads,
    memory: MemoryRegulator,
    record: Mapping[str, Any],
    stores: tuple[Store, Store],
) -> RemadeReport:
    rules = parse_rules({"rule": record["rules"], "rest": "keep"}, f"{report.path}: {MADE_BY}")
    result = ItemsReader(stores[0], partial(_value, files[0]))
    split, item = record.get("split", "."), record.get("item")
    if not isinstance(split, str | None) or not isinstance(item, str | None):
        return replace(report, problem="what is recorded of it is no record")

    source = ItemsReader(stores[1], partial(_value, files[1]), split, rules=rules)
    found = await threads.run(_values, result, report.path, None)
    made = await threads.run(_values, source, report.source, item)
    digests = await threads.run(_digests_now, made.values())
    same, differing, changed = list[str](), list[str](), list[str]()
    nbytes = 0
    for name, recorded in cast("dict[str, object]", record["leaves"]).items():
        about = _table(recorded)
        before = _table(about.get("of"))
        if any(digests.get(one) not in (None, digest) for one, digest in before.items() if digest):
            changed.append(name)
            continue

        pair = found.get(name), made.get(str(about.get("was", name)))
        if pair[0] is None or pair[1] is None:
            differing.append(name)
            continue

        nbytes += pair[0].stored.spec.nbytes
        piece = min(_PIECE_BYTES, max(1, memory.limit // 4))
        lease = await memory.acquire(min(4 * piece, memory.limit))
        try:
            are_same = await threads.run(_are_same, pair[0], pair[1], piece)
        finally:
            lease.release()

        (same if are_same else differing).append(name)

    return replace(
        report, same=tuple(same), differing=tuple(differing), changed=tuple(changed), nbytes=nbytes
    )


def _table(value: object) -> dict[str, Any]:
    """Return what should be a table. Anything may be recorded."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _value(files: SourceFiles, place: str, opened: StoredCheckpoint, leaf: StoredLeaf) -> object:
    return stored_value(files, opened, leaf)


def _values(reader: ItemsReader, path: str, item: str | None) -> dict[str, StoredValue]:
    """Return the arrays of a checkpoint by their dotted names. Blocking."""
    leaves, _ = flatten_tree(reader.read(path, item).tree)
    return {leaf.info.name: leaf.value for leaf in leaves if isinstance(leaf.value, StoredValue)}


def _digests_now(values: Iterable[StoredValue]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for source in {id(value.checkpoint): value.checkpoint for value in values}.values():
        if isinstance(source, DerivedCheckpoint):
            stored = source.source
            found.update(recorded_digests(stored, [leaf.info.name for leaf in stored.leaves]))

    return found


def _are_same(first: StoredValue, second: StoredValue, piece_bytes: int) -> bool:
    """Compare two arrays, bit for bit and piece by piece. Blocking."""
    spec, other = first.stored.spec, second.stored.spec
    if spec.shape != other.shape:
        return False
    if spec.dtype != other.dtype:  # cast by the `dtype` of the conversion, after its rules
        second = replace(second, dtype=spec.dtype)

    pieces = _bytes_of(second, piece_bytes)
    rest = memoryview(b"")
    for piece in _bytes_of(first, piece_bytes):
        at = 0
        while at < len(piece):
            rest = rest or next(pieces)
            n = min(len(rest), len(piece) - at)
            if piece[at : at + n] != rest[:n]:
                return False

            at, rest = at + n, rest[n:]

    return True


def _bytes_of(value: StoredValue, piece_bytes: int) -> Iterator[memoryview]:
    """Yield the elements in C order."""
    handler, info = StoredValueHandler(), value.stored.info
    (spec,) = handler.describe([value], [info], {})
    whole = tuple([size or 1 for size in spec.shape or ()])
    leaf = Leaf(0, info, value, replace(spec, chunk_shape=whole, write_shape=None, codec=None), handler)
    for plan in handler.pieces(leaf, piece_bytes):
        yield plan.take().cast("B")
