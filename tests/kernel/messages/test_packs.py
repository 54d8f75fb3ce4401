"""A pack is a sequence of leaves that are made when somebody looks at them, and of each there is one."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel import KeyKind, LeafSpec, ParamInfo, ReadLeaf, ReadPack, StoredLeaf
from penstock.kernel.messages.packs import IndexedValues

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


def pack(sizes: list[int], make: Maker) -> ReadPack:
    n = len(sizes)
    return ReadPack(
        handler=HANDLER,
        file="/file",
        indices=[10 * at for at in range(n)],
        specs=[LeafSpec(str(at)) for at in range(n)],
        details=list(range(n)),
        offsets=[100 * at for at in range(n)],
        crc32cs=[1000 * at for at in range(n)],
        sizes=sizes,
        info=info,
        make=make,
        made={},
    )


def test_leaves_are_made_once_and_only_if_somebody_looks() -> None:
    make = Maker()
    whole = pack([1, 2, 3], make)
    assert (len(whole), whole.nbytes, whole.key_path(1)) == (3, 6, "[10]")
    assert make.made == []

    leaves = list(whole)
    assert [leaf.index for leaf in leaves] == [0, 10, 20]
    assert whole[1] is leaves[1]
    assert whole[-2:] == tuple(leaves[1:])
    assert whole.part([2])[0] is leaves[2]
    assert make.made == [0, 10, 20]


def test_a_part_has_the_same_columns() -> None:
    part = pack([1, 2, 3], Maker()).part([2, 0])
    assert part.indices == [20, 0]
    assert [spec.typestr for spec in part.specs] == ["2", "0"]
    assert (part.details, part.offsets, part.crc32cs, part.sizes) == ([2, 0], [200, 0], [2000, 0], [3, 1])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 40))
def test_parts_are_as_large_as_they_may_be(sizes: list[int], most_leaves: int, most_bytes: int) -> None:
    parts = list(pack(sizes, Maker()).cut(most_leaves, most_bytes))

    assert [size for part in parts for size in part.sizes] == sizes
    assert [index for part in parts for index in part.indices] == [10 * at for at in range(len(sizes))]
    for part in parts:
        assert 0 < len(part) <= most_leaves
        assert part.nbytes <= most_bytes or len(part) == 1
    for part, following in itertools.pairwise(parts):
        assert len(part) == most_leaves or part.nbytes + following.sizes[0] > most_bytes


def test_what_fits_is_not_cut() -> None:
    whole = pack([1, 2], Maker())
    assert list(whole.cut(2, 3)) == [whole]
    assert next(iter(whole.cut(2, 3))) is whole


def test_values_with_their_places() -> None:
    values = IndexedValues([4, 2, 7], ["a", "b", "c"])
    assert list(values) == [(4, "a"), (2, "b"), (7, "c")]
    assert len(values) == 3
    assert values[1] == (2, "b")
    assert values[1:] == ((2, "b"), (7, "c"))
    assert dict(values) == {4: "a", 2: "b", 7: "c"}
    with pytest.raises(IndexError):
        cast("Any", values)[3]
