"""Chunks that TensorStore reads or decodes: those with a codec, and those that were never written.

An `ArrayDriver` reads straight into the destination. `decode_into` decodes bytes that are in memory already,
where they were compared with their checksums.
"""

from __future__ import annotations

__all__ = ("ArrayDriver", "decode_into", "part_of_region")

import os
from typing import Any, Final, cast, final

import numpy as np
import tensorstore as ts

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.region_reads import Bounds, StoredChunk, intersect, shape_of
from penstock.handlers.formats.zarr import ArrayFormat
from penstock.kernel.concurrency.threads import ForeignFuture, await_future
from penstock.kernel.errors import (
    CorruptCheckpointError,
    PenstockError,
    StorageError,
    UnsupportedByStoreError,
)
from penstock.kernel.protocols.reads import Destination
from penstock.kernel.protocols.stores import Store

# Half of TensorStore's signatures are unknown to the checkers: its stubs use names they do not define.
_ts = cast("Any", ts)

# The index is worth keeping between reads; a chunk is not, for it is read once.
_CONTEXT: Final = {
    "cache_pool": {"total_bytes_limit": 0},
    "cache_pool#ocdbt": {"total_bytes_limit": 64 * 1024 * 1024},
}

# Prefix of TensorStore's messages about the medium; all others are about its content. Exception types do not
# help: most are ValueError.
_MEDIUM: Final = (
    "ABORTED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNKNOWN",
)


@final
class ArrayDriver:
    """Reads parts of the arrays in one directory. Opens nothing until it reads.

    Args:
        store: Where the arrays are.
        directory: The directory that holds them; absolute.
        ocdbt: Whether they are in an OCDBT database there, or each in its own directory.

    Raises:
        UnsupportedByStoreError: If TensorStore cannot read the store.
    """

    __slots__ = ("_context", "_directory", "_ocdbt", "_store")

    def __init__(self, store: Store, directory: str, *, ocdbt: bool) -> None:
        if store.kvstore_spec(directory) is None:
            raise UnsupportedByStoreError("read with TensorStore", directory, store, "a kvstore_spec")

        self._store = store
        self._directory = directory
        self._ocdbt = ocdbt
        self._context = ts.Context(_CONTEXT)

    async def read(
        self, array: ArrayFormat, prefix: str, key_path: str, region: Destination, box: Bounds
    ) -> None:
        """Fill the part `box` of `region`.

        Args:
            array: The array's metadata.
            prefix: What its keys begin with; empty, or with a slash at the end.
            key_path: Of the leaf, for the error.
            region: The destination.
            box: In the global array; within the region.

        Raises:
            CorruptCheckpointError: If what is stored cannot be decoded, or is not there.
            StorageError: If the medium fails.

        Cancellation:
            TensorStore is asked to stop and not waited for; it may write into the region for a
            while longer, and keeps the buffer alive until then.
        """
        await self._read(array, prefix, key_path, region, box, tuple([slice(lo, hi) for lo, hi in box]))

    async def fill(
        self, array: ArrayFormat, prefix: str, key_path: str, region: Destination, box: Bounds
    ) -> None:
        """Fill the part `box` of `region`, no chunk of which was ever written, with the array's fill value.

        One element is looked up, for all of them. The arguments and the errors are those of `read`.
        """
        await self._read(array, prefix, key_path, region, box, tuple([lo for lo, _ in box]))

    async def _read(
        self,
        array: ArrayFormat,
        prefix: str,
        key_path: str,
        region: Destination,
        box: Bounds,
        source: tuple[slice | int, ...],
    ) -> None:
        try:
            opening: ForeignFuture[ts.TensorStore] = _ts.open(
                self._spec(array, prefix), context=self._context, read=True
            )
            stored: Any = await await_future(opening)
            part = stored[source]
            target = _ts.array(part_of_region(array, region, box), copy=False)
            await await_future(target.write(part).commit)
        except (ValueError, TypeError, OverflowError, NotImplementedError, OSError, RuntimeError) as error:
            raise self._translated(error, prefix, key_path) from error

    def _spec(self, array: ArrayFormat, prefix: str) -> dict[str, Any]:
        kvstore: dict[str, Any] | None
        if self._ocdbt:
            base = self._store.kvstore_spec(self._directory)
            kvstore = {
                "driver": "ocdbt",
                "base": base,
                "path": prefix,
                "cache_pool": "cache_pool#ocdbt",
            }
        else:
            kvstore = self._store.kvstore_spec(os.path.join(self._directory, prefix))

        return {
            "driver": "zarr" if array.version == 2 else "zarr3",
            "kvstore": kvstore,
            "metadata": array.metadata,
            "open": True,
            "assume_metadata": True,  # the index was read; do not read it again
            "recheck_cached_metadata": False,  # a finished checkpoint does not change
            "recheck_cached_data": False,
        }

    def _translated(self, error: Exception, prefix: str, key_path: str) -> PenstockError:
        path = os.path.join(self._directory, prefix)
        text = " ".join(str(error).split())
        if not text.startswith(_MEDIUM):
            return CorruptCheckpointError(path, text, key_path=key_path)

        failure = StorageError("read", path, text)
        failure.key_path = key_path
        return failure


def part_of_region(array: ArrayFormat, region: Destination, box: Bounds) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the part `box` of the region's buffer, as an array that shares its memory."""
    whole = np.frombuffer(region.view(), numpy_dtype(array.dtype)).reshape(shape_of(region.bounds))
    offsets = [start for start, _ in region.bounds]
    return whole[tuple([slice(lo - at, hi - at) for (lo, hi), at in zip(box, offsets, strict=True)]) or ...]


_NO_CACHE: Final = {"cache_pool": {"total_bytes_limit": 0}}


def decode_into(
    form: ArrayFormat, chunk: StoredChunk, region: Destination, key_path: str, stored: memoryview
) -> None:
    """Decode a chunk, in TensorStore's threads, and copy what overlaps `region` into it. Blocking.

    Args:
        form: Of the array.
        chunk: Where its elements stand; its file and offset are for the error.
        region: Where they go.
        key_path: Of the leaf, for the error.
        stored: The encoded bytes, all of them.

    Raises:
        CorruptCheckpointError: If they cannot be decoded.
    """
    whole: Bounds = tuple([(at, at + n) for at, n in zip(chunk.start, chunk.shape, strict=True)])
    box = intersect(whole, region.bounds)
    within = tuple([slice(lo - at, hi - at) for (lo, hi), at in zip(box, chunk.start, strict=True)])
    spec = {
        "driver": "zarr" if form.version == 2 else "zarr3",
        "kvstore": {"driver": "memory"},
        "metadata": {**form.metadata, "shape": list(form.chunk_shape)},  # an array of this chunk alone
        "open": True,
        "assume_metadata": True,
    }
    try:
        # A separate context has its own memory, which is freed with it.
        array = _ts.open(spec, context=ts.Context(_NO_CACHE)).result()
        array.kvstore.write(form.chunk_key((0,) * len(chunk.shape)), bytes(stored)).result()
        target = _ts.array(part_of_region(form, region, box), copy=False)
        target.write(array[within]).commit.result()
    except (ValueError, TypeError, OverflowError, NotImplementedError, OSError, RuntimeError) as error:
        text = f"bytes {chunk.offset} to {chunk.offset + len(stored)} cannot be decoded: {error}"
        raise CorruptCheckpointError(chunk.file, " ".join(text.split()), key_path=key_path) from error
