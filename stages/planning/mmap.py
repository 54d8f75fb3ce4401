"""Maps leaves instead of reading them: their memory is the mapped file, in the page cache."""

from __future__ import annotations

__all__ = ("map_leaves",)

from collections.abc import Sequence
from dataclasses import replace

from penstock.kernel.errors import UnsupportedByStoreError
from penstock.kernel.messages.packs import ReadLeaf
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.reads import Adopting, DirectRead, Read
from penstock.kernel.protocols.store_capabilities import MappedFiles
from penstock.stages.common.opaque_leaves import check_plain


def map_leaves(run: RestoreRun, leaves: Sequence[ReadLeaf]) -> list[ReadLeaf]:
    """Map every region that is stored as one plain range of a file. Blocking.

    A region that is stored in another way (with a codec, in several chunks, for another sharding) is
    read as usual. The checksums of mapped bytes are not checked, since that would read every byte.

    Raises:
        UnsupportedByStoreError: If the store cannot map files.
        StorageError: If a file cannot be mapped.
        UnsupportedFormatError: If a leaf is opaque: its file does not hold its plain bytes.
    """
    store = run.store
    if not isinstance(store, MappedFiles):
        raise UnsupportedByStoreError("map the files of", run.path, store, MappedFiles)

    files: dict[str, memoryview] = {}
    return [_map_leaf(store, leaf, files) for leaf in leaves]


def _map_leaf(store: MappedFiles, leaf: ReadLeaf, files: dict[str, memoryview]) -> ReadLeaf:
    remaining: list[Read] = list(leaf.reads)
    check_plain(leaf.reads)
    for region in leaf.target.regions:
        mine = [read for read in leaf.reads if isinstance(read, DirectRead) and read.region is region]
        if not isinstance(region, Adopting) or not _is_one_range(mine, region.nbytes):
            continue

        path, offset = mine[0].file, mine[0].offset
        if path not in files:
            files[path] = store.map_file(path)
        if offset + region.nbytes > len(files[path]):
            continue  # the stage that reads it raises the error

        region.adopt(files[path][offset : offset + region.nbytes])
        remaining = [read for read in remaining if not any(read is one for one in mine)]

    return leaf if len(remaining) == len(leaf.reads) else replace(leaf, reads=tuple(remaining))


def _is_one_range(reads: Sequence[DirectRead], nbytes: int) -> bool:
    """Whether reads fill a region, in order, from one range of one file."""
    end = 0
    for read in reads:
        first = reads[0]
        if read.file != first.file or read.start != end or read.offset != first.offset + end:
            return False

        end += read.nbytes

    return end == nbytes > 0
