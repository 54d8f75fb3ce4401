"""Encodes whole chunks with a codec that TensorStore has, in memory."""

from __future__ import annotations

__all__ = ("encode_with_tensorstore",)

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

TOGETHER_BELOW: Final = 1 << 20  # copying larger ones next to each other would cost more than it saves


def encode_with_tensorstore(
    compressor: Mapping[str, Any], chunks: Sequence[memoryview], itemsize: int = 1
) -> list[bytes]:
    """Encode each chunk by itself. Blocking; TensorStore's threads do the work.

    Chunks of equal length go together, as rows of a matrix, because opening an array costs more than encoding
    a small chunk.

    Args:
        compressor: The member `compressor` of a `.zarray`.
        chunks: Bytes; none of them empty.
        itemsize: Bytes of one element, 1, 2, 4 or 8, where the codec goes by it.
    """
    by_length: dict[int, list[int]] = {}
    for at, chunk in enumerate(chunks):
        by_length.setdefault(len(chunk), []).append(at)

    found: list[bytes] = [b""] * len(chunks)
    for length, places in by_length.items():
        most = len(places) if length < TOGETHER_BELOW else 1
        for first in range(0, len(places), most):
            group = places[first : first + most]
            made = _encode(compressor, [chunks[at] for at in group], length, itemsize)
            for at, data in zip(group, made, strict=True):
                found[at] = data

    return found


def _encode(
    compressor: Mapping[str, Any], chunks: Sequence[memoryview], length: int, itemsize: int
) -> list[bytes]:
    import tensorstore  # here, because a save without a codec never needs it

    # Half of its signatures are unknown to the checkers: its stubs use names they do not define.
    ts = cast("Any", tensorstore)
    dtype = np.dtype(f"<u{itemsize}" if itemsize > 1 else "|u1")
    joined = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    rows = np.frombuffer(joined, dtype).reshape(len(chunks), length // itemsize)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "memory"},
        "metadata": {
            "zarr_format": 2,
            "shape": rows.shape,
            "chunks": (1, length // itemsize),
            "dtype": dtype.str,
            "compressor": dict(compressor),
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
    array = ts.open(spec, context=context).result()
    array.write(rows, can_reference_source_data_indefinitely=True).result()
    kvstore = array.kvstore  # which is created anew on each access
    reads = [kvstore.read(f"{row}.0") for row in range(len(chunks))]
    return [read.result().value for read in reads]
