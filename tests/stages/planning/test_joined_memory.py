from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

from penstock.kernel import LeafSpec, ParamInfo, ReadLeaf, StoredLeaf, Target
from penstock.stages.planning.leaf_reads import OWN_FROM, TOGETHER, join_memory

KIB, MIB = 2**10, 2**20


@final
class Region:
    """Notes whom it was joined with."""

    bounds = ()

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.others: Sequence[Region] = ()

    def fresh(self) -> Region:
        raise NotImplementedError

    def view(self) -> memoryview:
        raise NotImplementedError

    def join(self, others: Sequence[Region], /) -> None:
        self.others = others


@final
class Alone:
    """Has memory of its own, whatever comes."""

    bounds = ()

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def fresh(self) -> Alone:
        raise NotImplementedError

    def view(self) -> memoryview:
        raise NotImplementedError


def leaf(*regions: Region | Alone, staging_bytes: int = 0) -> ReadLeaf:
    stored = StoredLeaf(ParamInfo((), (), ""), LeafSpec("a", (), "uint8", 1, (), ()))
    return ReadLeaf(0, stored, cast("Any", None), Target(regions, staging_bytes), ())


def test_neighbours_of_medium_size_are_joined_up_to_one_allocation() -> None:
    regions = [Region(3 * MIB) for _ in range(7)]

    join_memory([leaf(region) for region in regions])

    most = TOGETHER // (3 * MIB)
    assert [*regions[0].others] == regions[1:most]
    assert [*regions[most].others] == regions[most + 1 :]
    assert not any(region.others for region in (*regions[1:most], *regions[most + 1 :]))


def test_the_large_the_small_and_those_whose_memory_dies_soon_stay_alone() -> None:
    large, small, staged = Region(OWN_FROM), Region(64 * KIB - 1), Region(MIB)
    one, other, alone = Region(64 * KIB), Region(OWN_FROM - 1), Alone(MIB)

    join_memory([leaf(one, large), leaf(small), leaf(staged, staging_bytes=MIB), leaf(alone), leaf(other)])

    assert [*one.others] == [other]
    assert not any(region.others for region in (large, small, staged, other))


def test_a_single_region_is_not_joined() -> None:
    only = Region(MIB)

    join_memory([leaf(only)])

    assert only.others == ()
