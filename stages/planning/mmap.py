"""Maps leaves instead of reading them: their memory is the mapped file, in the page cache."""

from __future__ import annotations

__all__ = ("map_leaves",)

from collections.abc import Iterator, Sequence
from dataclasses import replace

from crc32c import crc32c

from penstock.kernel.errors import ChecksumError, UnsupportedByStoreError
from penstock.kernel.messages.packs import ReadLeaf
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.reads import Adopting, CheckedRead, DirectRead, Read, ScatterRead
from penstock.kernel.protocols.store_capabilities import MappedFiles
from penstock.stages.planning.leaf_reads import check_plain


def map_leaves(run: RestoreRun, leaves: Sequence[ReadLeaf], verify: bool = False) -> list[ReadLeaf]:
    """Map every region that is stored as one plain range of a file. Blocking.

    A region that is stored in another way (with a codec, in several chunks, for another sharding) is
    read as usual.

    Args:
        run: The restore.
        leaves: What is to be restored.
        verify: Whether mapped bytes are compared with their checksums, which reads every byte.

    Raises:
        UnsupportedByStoreError: If the store cannot map files.
        StorageError: If a file cannot be mapped.
        ChecksumError: If `verify` is set and mapped bytes differ from those written.
        UnsupportedFormatError: If a leaf is opaque: its file does not hold its plain bytes.
    """
    store = run.store
    if not isinstance(store, MappedFiles):
        raise UnsupportedByStoreError("map the files of", run.path, store, MappedFiles)

    files: dict[str, memoryview] = {}
    return [_map_leaf(store, leaf, files, verify=verify) for leaf in leaves]


def _map_leaf(store: MappedFiles, leaf: ReadLeaf, files: dict[str, memoryview], *, verify: bool) -> ReadLeaf:
    check_plain(leaf.reads)
    mapped: set[int] = set()  # regions, by identity
    for region in leaf.target.regions:
        mine = [read for read in _direct(leaf.reads) if read.region is region]
        if not isinstance(region, Adopting) or not _is_one_range(mine, region.nbytes):
            continue

        path, offset = mine[0].file, mine[0].offset
        if path not in files:
            files[path] = store.map_file(path)
        if offset + region.nbytes > len(files[path]):
            continue  # the stage that reads it raises the error

        region.adopt(files[path][offset : offset + region.nbytes])
        mapped.add(id(region))

    if not mapped:
        return leaf
    if verify:
        _compare(leaf, files, mapped)

    return replace(leaf, reads=tuple(_left(leaf.reads, mapped)))


def _direct(reads: Sequence[Read]) -> list[DirectRead]:
    """Return all direct reads, and the direct parts of the others, by file and offset."""
    found = [read for read in reads if isinstance(read, DirectRead)]
    for read in reads:
        if isinstance(read, CheckedRead):
            found += [part for part in read.parts if isinstance(part, DirectRead)]

    return sorted(found, key=lambda read: (read.file, read.offset))


def _left(reads: Sequence[Read], mapped: set[int]) -> Iterator[Read]:
    """Yield what is still to be read."""
    for read in reads:
        if isinstance(read, CheckedRead):
            parts = tuple([part for part in read.parts if not _is_mapped(part, mapped)])
            if parts:
                yield replace(read, parts=parts)
        elif isinstance(read, ScatterRead) or not _is_mapped(read, mapped):
            yield read


def _is_mapped(read: Read, mapped: set[int]) -> bool:
    return isinstance(read, DirectRead) and id(read.region) in mapped


def _compare(leaf: ReadLeaf, files: dict[str, memoryview], mapped: set[int]) -> None:
    for read in leaf.reads:
        inside = read.parts if isinstance(read, CheckedRead) else (read,)
        if isinstance(read, DirectRead | CheckedRead) and any(_is_mapped(part, mapped) for part in inside):
            data = files[read.file][read.offset : read.offset + read.nbytes]
            if read.crc32c is not None and crc32c(data) != read.crc32c:
                problem = f"bytes {read.offset} to {read.offset + read.nbytes} differ from those written"
                raise ChecksumError(read.file, problem, key_path=leaf.info.key_path)


def _is_one_range(reads: Sequence[DirectRead], nbytes: int) -> bool:
    """Return whether reads fill a region, in order, from one range of one file."""
    end = 0
    for read in reads:
        first = reads[0]
        if read.file != first.file or read.start != end or read.offset != first.offset + end:
            return False

        end += read.nbytes

    return end == nbytes > 0
