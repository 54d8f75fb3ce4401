from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel import Read, ScatterRead
from penstock.stages.planning.leaf_reads import join_reads

FILE = bytes(range(200))
NOWHERE: Any = None


class Sink:
    """Records where the bytes of a read go."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self.expected = FILE[offset : offset + nbytes]
        self.got: list[bytes] = []

    def __call__(self, data: memoryview) -> None:
        self.got.append(bytes(data))


def perform(reads: tuple[Read, ...]) -> None:
    for read in reads:
        assert isinstance(read, ScatterRead)
        read.scatter(memoryview(FILE)[read.offset : read.offset + read.nbytes])


@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 50), st.sampled_from("ab"))), st.integers(1, 120)
)
def test_every_byte_arrives_where_it_went_before_and_none_is_read_for_nothing(
    ranges: list[tuple[int, int, str]], piece_bytes: int
) -> None:
    sinks = [Sink(offset, nbytes) for offset, nbytes, _ in ranges]
    reads = [
        ScatterRead(0, file, offset, nbytes, sink)
        for (offset, nbytes, file), sink in zip(ranges, sinks, strict=True)
    ]

    joined = join_reads(reads, piece_bytes)

    perform(joined)
    assert [sink.got for sink in sinks] == [[sink.expected] for sink in sinks]
    assert sum(read.nbytes for read in joined) <= sum(read.nbytes for read in reads)
    longest = max([nbytes for _, nbytes, _ in ranges], default=0)
    assert all(read.nbytes <= max(piece_bytes, longest) for read in joined)


def test_what_overlaps_is_one_read() -> None:
    sinks = [Sink(at, 30) for at in (10, 20, 30)]
    reads = [ScatterRead(3, "f", at, 30, sink) for at, sink in zip((10, 20, 30), sinks, strict=True)]

    assert [(read.leaf, read.nbytes) for read in join_reads(reads, 50)] == [(3, 50)]
    assert [read.nbytes for read in join_reads(reads, 49)] == [40, 30]


def test_what_only_touches_stays_apart() -> None:
    reads = [ScatterRead(0, "f", at, 10, Sink(at, 10)) for at in (0, 10)]

    assert len(join_reads(reads, 100)) == 2


def test_a_checksum_stays_with_its_bytes() -> None:
    whole = ScatterRead(0, "f", 0, 40, Sink(0, 40), crc32c=7)
    part = ScatterRead(0, "f", 8, 30, Sink(8, 30))
    beyond = ScatterRead(0, "f", 8, 60, Sink(8, 60))
    before = ScatterRead(0, "f", 0, 60, Sink(0, 60))

    def told(*reads: ScatterRead) -> list[tuple[int, int | None]]:
        return [(read.nbytes, getattr(read, "crc32c", None)) for read in join_reads(reads, 100)]

    assert told(part, whole) == [(40, 7)]
    assert told(whole, beyond) == [(40, 7), (60, None)]
    assert told(whole, before) == [(60, None), (40, 7)]
    assert told(whole, whole) == [(40, 7)]
