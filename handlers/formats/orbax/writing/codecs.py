"""Encoding whole chunks with TensorStore, in memory.

Codecs work on plain bytes, so chunks are encoded as rows of a byte matrix. Chunks of equal length go
together, because opening an array costs more than encoding a small chunk.
"""

from __future__ import annotations

__all__ = ("encode",)

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import tensorstore as ts

from penstock.handlers.formats.zarr import v2_compressor

# Half of TensorStore's signatures are unknown to the checkers: its stubs use names they do not define.
_ts = cast("Any", ts)

TOGETHER_BELOW: Final = 1 << 20  # copying larger ones next to each other would cost more than it saves


def encode(codec: str, chunks: Sequence[memoryview]) -> list[bytes]:
    """Encode each chunk. Blocking; TensorStore's threads do the work.

    Args:
        codec: `zstd:<level>`.
        chunks: Bytes; none of them empty.
    """
    by_length: dict[int, list[int]] = {}
    for at, chunk in enumerate(chunks):
        by_length.setdefault(len(chunk), []).append(at)

    found: list[bytes] = [b""] * len(chunks)
    for length, places in by_length.items():
        most = len(places) if length < TOGETHER_BELOW else 1
        for first in range(0, len(places), most):
            group = places[first : first + most]
            for at, data in zip(group, _encode(codec, [chunks[at] for at in group], length), strict=True):
                found[at] = data

    return found


def _encode(codec: str, chunks: Sequence[memoryview], length: int) -> list[bytes]:
    joined = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    rows = np.frombuffer(joined, np.uint8).reshape(len(chunks), length)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "memory"},
        "metadata": {
            "zarr_format": 2,
            "shape": rows.shape,
            "chunks": (1, length),
            "dtype": "|u1",
            "compressor": v2_compressor(codec),
            "fill_value": None,
            "filters": None,
            "order": "C",
            "dimension_separator": ".",
        },
        "open": True,
        "assume_metadata": True,
        "store_data_equal_to_fill_value": True,
    }
    # A separate context has separate memory, which is freed with it.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    array = _ts.open(spec, context=context).result()
    array.write(rows, can_reference_source_data_indefinitely=True).result()
    kvstore = array.kvstore  # which is created anew on each access
    reads = [kvstore.read(f"{row}.0") for row in range(len(chunks))]
    return [read.result().value for read in reads]
