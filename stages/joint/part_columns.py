"""The message of one process to the primary about what it wrote: columns, compressed."""

from __future__ import annotations

__all__ = ("Part", "decoded_part", "encoded_part", "reading_part", "written_by")

import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

import msgpack
import numpy as np
import numpy.typing as npt

from penstock.kernel.concurrency.brief_steps import drop, parts_of
from penstock.kernel.errors import CoordinationError
from penstock.kernel.messages.save import WrittenBatch
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.written import COLUMNS, WrittenTable

_LEAF: Final = COLUMNS.index("leaf")
_FILE: Final = COLUMNS.index("file")
_NBYTES: Final = COLUMNS.index("nbytes")
_BLOCK_BYTES: Final = COLUMNS.index("block_bytes")
_N: Final = len(COLUMNS)
_TABLES: Final = 256  # joined in one call: of 10,000 that holds up every thread for 20 ms


@final
@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The message of another process."""

    files: Sequence[str]  #: relative to the checkpoint directory
    table: npt.NDArray[np.int64]  #: a row for each of `COLUMNS`
    own: Sequence[Any]  #: of the leaves that it alone has; see `encoded_own`
    digests: Mapping[str, bytes]  #: of what it wrote of leaves, by the names to record them under
    sums: bytes = b""  #: `ArrangedDigests.encoded`, if it wrote into files of all
    running: bytes = b""  #: the checksums of `Written.running`, row after row


def encoded_part(
    batches: Iterable[WrittenBatch],
    numbers: Sequence[int] | npt.NDArray[np.int64] | None = None,
    own: Sequence[Any] = (),
    digests: Mapping[str, bytes] = MappingProxyType({}),
    sums: bytes = b"",
) -> bytes:
    """Encode where everything of some batches is.

    Neighbouring rows differ by little, so differences are what is compressed.

    Args:
        batches: What was written.
        numbers: The number under which each leaf is announced; by default its place.
        own: Sent with it: of the leaves that this process alone has.
        digests: Sent with it: of what this process wrote of leaves, by the names to record them under.
        sums: Sent with it: what `ArrangedDigests.encoded` returns, if it wrote into files of all.
    """
    files: dict[str, int] = {}
    blocks: list[npt.NDArray[np.int64]] = [np.zeros((_N, 0), np.int64)]
    runs: list[bytes] = []
    for written in [batch.written for batch in batches]:
        block = np.array([getattr(written, name) for name in COLUMNS], np.int64)
        block[_FILE] = np.array([files.setdefault(file, len(files)) for file in written.files])[block[_FILE]]
        if numbers is not None:
            block[_LEAF] = np.asarray(numbers)[block[_LEAF]]

        blocks.append(block)
        runs.append(written.running)

    table = np.concatenate(blocks, axis=1)
    order = np.lexsort(table[::-1])
    table, running = table[:, order], _in_order(b"".join(runs), table, order)
    columns = [np.diff(column, prepend=0).astype("<i8").tobytes() for column in table]
    told = {"files": list(files), "columns": columns, "own": own, "digests": dict(digests), "sums": sums}
    if running:
        told["running"] = running

    return zlib.compress(msgpack.packb(told, unicode_errors="surrogatepass"), 1)


def decoded_part(data: bytes) -> Part:
    """Decode what `encoded_part` made.

    Raises:
        CoordinationError: If it is something else.
    """
    with reading_part():
        unpacked: Any = msgpack.unpackb(zlib.decompress(data), unicode_errors="surrogatepass")
        columns: list[bytes] = unpacked["columns"]
        if len(set(map(len, columns))) != 1:
            raise ValueError("it has columns of different lengths")

        table = np.cumsum(np.frombuffer(b"".join(columns), "<i8").reshape(_N, -1), axis=1)
        told = dict(unpacked["digests"]), bytes(unpacked["sums"]), bytes(unpacked.get("running", b""))
        _check_running(table, told[-1])
        return Part(list(unpacked["files"]), table, list(unpacked["own"]), *told)


def written_by(
    specs: Sequence[LeafSpec],
    parts: Mapping[int, Part],
    places: Mapping[int, npt.NDArray[np.int64]] = MappingProxyType({}),
) -> WrittenBatch:
    """Return what other processes wrote, all in one table: a thousand small ones would take as many steps.

    Args:
        specs: Of all leaves.
        parts: The announcement of each process.
        places: By process: of its leaves among all of them, by the numbers it announced; by default the same.

    Raises:
        CoordinationError: If one names what is not there.
    """
    tables: list[npt.NDArray[np.int64]] = []
    running = b"".join([parts[index].running for index in sorted(parts)])
    files: list[str] = []
    with reading_part():
        for index in sorted(parts):
            table = parts[index].table.copy()
            leaf, file = table[_LEAF], table[_FILE]
            file[:] = _checked(file, len(parts[index].files)) + len(files)
            if index in places:
                leaf[:] = places[index][_checked(leaf, len(places[index]))]

            tables.append(table)
            files += parts[index].files

        # Each by itself: to give back one block of all, of 50 MB, would hold up every thread for a while.
        none = np.zeros(0, np.int64)
        if len(tables) > _TABLES:
            blocks = [np.concatenate(some, axis=1) for some in parts_of(tables, _TABLES)]
            drop(tables)
            tables = blocks

        rows = {name: [none, *[table[at] for table in tables]] for at, name in enumerate(COLUMNS)}
        by_name = {name: np.concatenate(found) for name, found in rows.items()}
        _check(by_name, specs)

    written = WrittenTable(specs=specs, files=files, running=running, **by_name)
    return WrittenBatch((), written, are_names_durable=True)


@contextmanager
def reading_part() -> Generator[None]:
    """Turn errors about a part, in the block, into a `CoordinationError`."""
    try:
        yield
    except (zlib.error, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise CoordinationError(
            f"what another process wrote cannot be read ({error}): do all processes run one penstock?"
        ) from error


def _checked(numbers: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return numbers, if each is below `count`."""
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
        raise ValueError("it names what is not there")

    return numbers


def _check(columns: Mapping[str, npt.NDArray[np.int64]], specs: Sequence[LeafSpec]) -> None:
    """Raise `ValueError` unless every row is of an existing leaf and chunk."""
    counts = {number: spec.n_chunks for number, spec in {id(spec): spec for spec in specs}.items()}
    n_chunks = np.array([counts[id(spec)] for spec in specs], np.int64)
    leaf, chunk, *rest = (columns[name] for name in ("leaf", "chunk", "start", "offset", "nbytes"))
    _checked(leaf, len(specs))
    if len(leaf) and not (
        (chunk >= 0).all() and (chunk < n_chunks[leaf]).all() and min([column.min() for column in rest]) >= 0
    ):
        raise ValueError("it names what is not there")


def _check_running(table: npt.NDArray[np.int64], running: bytes) -> None:
    """Raise `ValueError` unless there are as many checksums of blocks as the rows say."""
    nbytes, block_bytes = table[_NBYTES], table[_BLOCK_BYTES]
    if len(block_bytes) and block_bytes.min() < 0:
        raise ValueError("it has blocks of no length")

    has = block_bytes > 0
    if len(running) != 4 * int(((nbytes[has] - 1) // block_bytes[has]).sum()):
        raise ValueError("it has another number of checksums than of blocks")


def _in_order(running: bytes, table: npt.NDArray[np.int64], order: npt.NDArray[np.intp]) -> bytes:
    """Return the checksums of blocks of all rows, in another order of the rows."""
    if not running:
        return running

    nbytes, block_bytes = table[_NBYTES], table[_BLOCK_BYTES]
    counts = np.where(block_bytes > 0, (nbytes - 1) // np.maximum(block_bytes, 1), 0)
    ends = 4 * np.cumsum(counts)
    rows = order[counts[order] > 0]
    return b"".join([running[end - 4 * n : end] for n, end in zip(counts[rows], ends[rows], strict=True)])
