"""Leaves that share a read are a sequence of leaves that are made when somebody looks at them, each once."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel import KeyKind, LeafSpec, ParamInfo, ReadLeaf, ReadLeaves, StoredLeaf
from penstock.kernel.concurrency.brief_steps import cuts
from penstock.kernel.protocols import SharedRead

HANDLER: Any = object()


def info(index: int) -> ParamInfo:
    return ParamInfo((str(index),), (KeyKind.SEQUENCE,), f"[{index}]")


class Maker:
    """Counts what is made."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __call__(self, index: int) -> ReadLeaf:
        self.made.append(index)
        return ReadLeaf(index, StoredLeaf(info(index), LeafSpec("t")), HANDLER)


def pack(sizes: list[int], make: Maker) -> ReadLeaves:
    n = len(sizes)
    indices = [10 * at for at in range(n)]
    specs = [LeafSpec(str(at), (size,), "uint8", 1, (size,)) for at, size in enumerate(sizes)]
    return ReadLeaves(
        indices=indices,
        handlers=[HANDLER] * n,
        specs=specs,
        details=list(range(n)),
        info=info,
        make=make,
        made={},
        shared=SharedRead(
            leaves=indices,
            file="/file",
            specs=specs,
            offsets=[100 * at for at in range(n)],
            sizes=sizes,
            crc32cs=[1000 * at for at in range(n)],
        ),
    )


def test_leaves_are_made_once_and_only_if_somebody_looks() -> None:
    make = Maker()
    whole = pack([1, 2, 3], make)
    assert (len(whole), whole.nbytes, whole.info(whole.indices[1]).key_path) == (3, 6, "[10]")
    assert make.made == []

    leaves = list(whole)
    assert [leaf.index for leaf in leaves] == [0, 10, 20]
    assert whole[1] is leaves[1]
    assert list(whole[-2:]) == leaves[1:]
    assert whole.part([2])[0] is leaves[2]
    assert make.made == [0, 10, 20]


def test_a_part_has_the_same_columns_and_a_buffer_of_its_own() -> None:
    whole = pack([1, 2, 3], Maker())
    part = whole.part([2, 0])
    assert part.indices == [20, 0]
    assert [spec.typestr for spec in part.specs] == ["2", "0"]
    assert whole.shared is not None
    shared = part.shared
    assert shared is not None
    assert (part.details, shared.leaves, shared.file) == ([2, 0], [20, 0], "/file")
    assert (shared.offsets, shared.crc32cs, shared.sizes) == ([200, 0], [2000, 0], [3, 1])
    assert shared.buffer is not whole.shared.buffer


def test_what_was_read_is_seen_leaf_by_leaf() -> None:
    make = Maker()
    whole = pack([1, 2, 3], make)
    assert whole.shared is not None
    whole.shared.buffer.fill(memoryview(bytearray(b"cc-abbb"))[:], [3, 0, 4])

    (region,) = whole[2].target.regions

    assert (bytes(region.view()), region.bounds, region.nbytes) == (b"bbb", ((0, 3),), 3)
    assert [bytes(leaf.target.regions[0].view()) for leaf in whole] == [b"a", b"cc", b"bbb"]
    assert [leaf.target.detail for leaf in whole] == [0, 1, 2]
    assert [leaf.info.key_path for leaf in whole] == ["[0]", "[10]", "[20]"]
    assert make.made == []


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 40))
def test_parts_are_as_large_as_they_may_be(sizes: list[int], most_leaves: int, most_bytes: int) -> None:
    whole = pack(sizes, Maker())
    parts = [whole.part(range(*numbers)) for numbers in cuts(whole.weights, most_bytes, most_leaves)]

    assert [size for part in parts for size in part.weights] == sizes
    assert [index for part in parts for index in part.indices] == [10 * at for at in range(len(sizes))]
    for part in parts:
        assert 0 < len(part) <= most_leaves
        assert part.nbytes <= most_bytes or len(part) == 1
    for part, following in itertools.pairwise(parts):
        assert len(part) == most_leaves or part.nbytes + following.weights[0] > most_bytes


def test_leaves_that_are_read_alone_are_put_into_columns_as_they_are() -> None:
    leaves = [ReadLeaf(at, StoredLeaf(info(at), LeafSpec("t")), HANDLER) for at in (3, 1)]

    found = ReadLeaves.of(leaves)

    assert (found.indices, found.reads, found.staging_bytes, found.n_ended) == ([3, 1], (), 0, 2)
    assert all(a is b for a, b in zip(found, leaves, strict=True))
    assert ReadLeaves.of(found) is found
    assert found.info(1) is leaves[1].info
