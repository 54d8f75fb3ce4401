"""What the files of a checkpoint take on the medium, and their checksums."""

from __future__ import annotations

__all__ = ("bytes_on_medium", "digest_of_file", "problem_of_holes", "range_crc32c")

from collections.abc import Iterable
from typing import Final

from crc32c import crc32c

from penstock.handlers.formats.common.integrity import Digest
from penstock.kernel.memory.memory_limit import FREE_BYTES, MOST_EXPANSION
from penstock.kernel.protocols.store_capabilities import UntrustedFiles
from penstock.kernel.protocols.stores import Store

_BLOCK_BYTES: Final = 4 * 2**20


def problem_of_holes(store: Store, path: str, nbytes: int) -> str:
    """Say why so many bytes are not read of the file at `path`; empty if they may be. Blocking."""
    if nbytes <= FREE_BYTES or store.kind(path) != "file":
        return ""

    stored = bytes_on_medium(store, [path])
    if nbytes <= MOST_EXPANSION * stored:
        return ""

    return f"takes {stored} bytes on the medium, and {nbytes} would be compared: it is not read"


def bytes_on_medium(store: Store, paths: Iterable[str]) -> int:
    """Return the bytes of files, all of each, but without their holes where the store can tell. Blocking."""
    if isinstance(store, UntrustedFiles):
        return sum(store.data_sizes(paths))

    return sum([store.size(path) for path in paths])


def digest_of_file(store: Store, path: str) -> Digest:
    """Return the digest of a file, which is read block by block. Blocking."""
    nbytes = store.size(path)
    return Digest(nbytes, range_crc32c(store, path, 0, nbytes))


def range_crc32c(store: Store, path: str, offset: int, nbytes: int) -> int:
    """Return the crc32c of a range of a file, which is read block by block. Blocking."""
    block = memoryview(bytearray(min(nbytes, _BLOCK_BYTES)))
    found, end = 0, offset + nbytes
    file = store.open_data_file(path)
    try:
        for at in range(offset, end, _BLOCK_BYTES):
            part = block[: min(len(block), end - at)]
            file.read_at(at, [part])
            found = crc32c(part, found)
    finally:
        file.close()

    return found
