"""Files with very many tensors, however small: what is done for each of them is little."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import penstock
from penstock.errors import ChecksumError
from penstock.handlers import LocalStore, default_handlers
from penstock.handlers.formats.safetensors.safetensors_checkpoint import open_checkpoint
from penstock.kernel import ReadLeaf, RunLimits, StoredRows, WholeChunks
from penstock.stages.planning.restore_planner import FEW, ResultLeaves, make_packs
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

N = 3000
LIMITS = RunLimits(2**20, N, 2**30)


def by_a_stranger(path: Path, shape: list[int]) -> Path:
    nbytes = 4 * int(np.prod(shape))
    entries = {
        f"t{at}": {"dtype": "F32", "shape": shape, "data_offsets": [nbytes * at, nbytes * (at + 1)]}
        for at in range(N)
    }
    header = json.dumps(entries, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes * N))
    return path


def wanted_of(checkpoint: Any) -> ResultLeaves:
    leaves = checkpoint.leaves
    handler = default_handlers().for_typestr("np.ndarray", "")
    numbers = range(len(leaves))
    specs = [leaves[at].spec for at in numbers]
    targets: Any = handler.targets(StoredRows(leaves, numbers, specs), None)
    return ResultLeaves(numbers, numbers, specs, [handler] * len(leaves), targets)


def never(_: int) -> ReadLeaf:
    raise AssertionError("no leaf is looked at by itself")


@pytest.mark.parametrize("shape", [[0], [1], [0, 3], [2, 2], []], ids=str)
async def test_small_tensors_travel_together(tmp_path: Path, shape: list[int]) -> None:
    path = by_a_stranger(tmp_path / "a.safetensors", shape)
    checkpoint = open_checkpoint(LocalStore(), str(path))
    packs, others = make_packs(checkpoint, wanted_of(checkpoint), LIMITS, never)
    assert ([len(pack) for pack in packs], list(others)) == ([N], [])

    store = FaultyStore(LocalStore())
    async with penstock.Checkpointer(store=store) as checkpointer:
        found = await checkpointer.restore(path)

    assert len(found) == N
    assert all(value.shape == tuple(shape) and not value.any() for value in found.values())
    assert [done.name for done in store.operations].count("file.read_at") < 10


async def test_what_penstock_wrote_is_compared_in_packs_too(tmp_path: Path) -> None:
    tree = {f"t{at:04}": np.full(at % 5, at, np.float32) for at in range(500)}
    path = tmp_path / "a.safetensors"
    await penstock.export_safetensors(tree, path)
    found = await penstock.restore(path)
    assert all(np.array_equal(found[name], value) for name, value in tree.items())

    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError) as raised:
        await penstock.restore(path)

    assert raised.value.key_path == "['t0499']"


class CountedIds(list[int]):
    """A column that counts how often it is gone through."""

    turns = 0

    def __iter__(self) -> Iterator[int]:
        self.turns += 1
        return super().__iter__()


class ManyFiles:
    """A checkpoint of which so many leaves are in a file."""

    def __init__(self, inner: Any, in_each: int) -> None:
        self.leaves = inner.leaves
        self.ids = CountedIds([at // in_each for at in range(N)])

    def whole_chunks(self, numbers: Any) -> WholeChunks:
        return WholeChunks([f"/{at}" for at in numbers], self.ids, [0] * N, [-1] * N)


@pytest.mark.parametrize("in_each", [1, FEW - 1, FEW, 100])
def test_files_are_not_gone_through_for_each_leaf_and_few_leaves_of_one_go_with_those_of_others(
    tmp_path: Path, in_each: int
) -> None:
    inner = open_checkpoint(LocalStore(), str(by_a_stranger(tmp_path / "a.safetensors", [1])))
    many = ManyFiles(inner, in_each)
    packs, others = make_packs(cast("Any", many), wanted_of(inner), LIMITS, never)

    together = N // in_each if in_each >= FEW else 0  # the last file may have fewer leaves
    assert (len(packs), list(others)) == (together, list(range(together * in_each, N)))
    assert many.ids.turns == 1
