"""Decodes chunks whose stored bytes are in memory, and were compared with their checksums there.

TensorStore decodes them, from memory, so every codec that it can read works here.
"""

from __future__ import annotations

__all__ = ("decode_into",)

from typing import Any, Final, cast

import tensorstore as ts

from penstock.handlers.formats.common.chunk_regions import Bounds, StoredChunk, intersect
from penstock.handlers.formats.common.zarr_metadata import ArrayFormat
from penstock.handlers.formats.orbax.chunks.tensorstore_reads import part_of_region
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.reads import Destination

# Half of TensorStore's signatures are unknown to the checkers: its stubs use names they do not define.
_ts = cast("Any", ts)

_NO_CACHE: Final = {"cache_pool": {"total_bytes_limit": 0}}


def decode_into(
    form: ArrayFormat, chunk: StoredChunk, region: Destination, key_path: str, stored: memoryview
) -> None:
    """Decode a chunk and bring what overlaps `region` there. Blocking; TensorStore's threads do the work.

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
        # A context of its own has memory of its own, which is freed with it.
        array = _ts.open(spec, context=ts.Context(_NO_CACHE)).result()
        array.kvstore.write(form.chunk_key((0,) * len(chunk.shape)), bytes(stored)).result()
        target = _ts.array(part_of_region(form, region, box), copy=False)
        target.write(array[within]).commit.result()
    except (ValueError, TypeError, OverflowError, NotImplementedError, OSError, RuntimeError) as error:
        text = f"bytes {chunk.offset} to {chunk.offset + len(stored)} cannot be decoded: {error}"
        raise CorruptCheckpointError(chunk.file, " ".join(text.split()), key_path=key_path) from error
