"""Cutting an array into chunks, and casting it to the stored dtype."""

from __future__ import annotations

__all__ = ("cast_to", "chunk_boxes", "stored_as")

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.leaves.common.contiguous_blocks import Box, boxes
from penstock.kernel.memory.buffers import MAPPED_FROM, anonymous_memory


def chunk_boxes(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Cut an array into chunks, and each chunk into boxes that are flat ranges of it in C order.

    Args:
        shape: Shape of the array; if an axis is empty there are no boxes.
        chunk_shape: Divides `shape` evenly.
        most: The most elements a box may have, at least 1.

    Yields:
        The grid index of the chunk, and a box whose `starts` count from the array's origin and whose
        `first` counts from the chunk's.
    """
    if 0 in shape:
        return
    if shape == chunk_shape:
        chunk = (0,) * len(shape)
        for box in boxes(shape, most):
            yield chunk, box

        return

    counts = [size // part for size, part in zip(shape, chunk_shape, strict=True)]
    within = list(boxes(chunk_shape, most))
    for chunk in itertools.product(*map(range, counts)):
        corner = [at * part for at, part in zip(chunk, chunk_shape, strict=True)]
        for box in within:
            starts = tuple([at + start for at, start in zip(corner, box.starts, strict=True)])
            yield chunk, replace(box, starts=starts)


@lru_cache(maxsize=256)
def stored_as(dtype: str) -> np.dtype[Any]:
    """The dtype named `dtype` in its stored byte order, little-endian."""
    return numpy_dtype(dtype).newbyteorder("<")


def cast_to(array: npt.NDArray[Any], dtype: str | np.dtype[Any], *, copy: bool = False) -> npt.NDArray[Any]:
    """Return the elements in C order, converted to `dtype` by C's rules.

    Args:
        array: An array of any strides and byte order.
        dtype: The dtype, or its name for the little-endian one.
        copy: Whether the result must not share the array's memory.
    """
    wanted = stored_as(dtype) if isinstance(dtype, str) else dtype
    host = np.asarray(array)
    with np.errstate(all="ignore"):  # values out of range are converted as C converts them
        if not copy or host.size * wanted.itemsize < MAPPED_FROM:
            return host.astype(wanted, order="C", copy=copy)

        memory = anonymous_memory(host.size * wanted.itemsize, huge_pages=True)
        made = np.frombuffer(memory, wanted).reshape(host.shape)
        np.copyto(made, host, casting="unsafe")
        return made
