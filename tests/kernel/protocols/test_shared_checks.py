"""Ranges that several reads compare together, a segment each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.handlers.formats.region_reads import combined_crc32c
from penstock.kernel import CheckedRead, DirectRead, Read, ScatterRead
from penstock.kernel.protocols.reads import RunningChecksums, narrowed, share_checks

START, NBYTES = 100, 64
FILE = bytes(at % 251 for at in range(300))
RANGE = crc32c(FILE[START : START + NBYTES])
KEPT = st.tuples(st.integers(0, NBYTES - 1), st.integers(1, 30))


class Buffer:
    """A destination of some bytes."""

    bounds = ()

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data = bytearray(nbytes)

    def fresh(self) -> Buffer:
        raise NotImplementedError

    def view(self) -> memoryview:
        return memoryview(self.data)


class Counted:
    """A file whose reads are counted."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.nbytes = 0

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer[:] = self.data[offset : offset + len(buffer)]
            offset += len(buffer)
            self.nbytes += len(buffer)


BLOCK = 7
BLOCKS = RunningChecksums(
    BLOCK, [crc32c(FILE[START : START + end]) for end in range(BLOCK, NBYTES, BLOCK)]
)  # the last one has a single byte


def kept(
    ranges: Sequence[tuple[int, int]],
    combine: Any = combined_crc32c,
    running: RunningChecksums | None = None,
) -> list[tuple[CheckedRead, Buffer]]:
    """Make a read for each range of what it keeps, as if each belonged to another part of a leaf."""
    found: list[tuple[CheckedRead, Buffer]] = []
    for number, (at, nbytes) in enumerate(ranges):
        buffer = Buffer(min(nbytes, NBYTES - at))
        part = DirectRead(number, "f", START + at, buffer.nbytes, buffer, 0)
        read = CheckedRead(number, "f", START, NBYTES, RANGE, (part,), combine, running=running)
        found.append((read, buffer))

    return found


def performed(groups: Sequence[Sequence[Read]], file: Counted) -> list[bool]:
    """Perform reads in their order, and return what each was told of the range."""
    told: list[bool] = []
    for read in [read for group in groups for read in group]:
        assert isinstance(read, CheckedRead)
        told.append(read.differs(read.fill(file.read_at, crc32c)))

    return told


@given(st.lists(KEPT, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_range_is_read_once_and_everyone_gets_their_bytes(
    ranges: list[tuple[int, int]], random: Any
) -> None:
    reads = kept(ranges)
    groups = share_checks([[read] for read, _ in reads])
    random.shuffle(groups)
    file = Counted(FILE)

    assert not any(performed(groups, file))

    for (read, buffer), (at, _) in zip(reads, ranges, strict=True):
        assert bytes(buffer.data) == FILE[START + at : START + at + read.parts[0].nbytes]
    assert sum(read.nbytes for (read,) in groups) == NBYTES  # what is counted as progress
    assert file.nbytes <= NBYTES + sum(buffer.nbytes for _, buffer in reads)
    assert all(
        isinstance(read, CheckedRead) and read.covered == (START, START + NBYTES) for (read,) in groups
    )


@given(
    st.lists(KEPT, min_size=1, max_size=6),
    st.integers(0, NBYTES - 1),
    st.randoms(use_true_random=False),
)
def test_whoever_reads_last_is_told_of_a_flipped_bit_wherever_it_is(
    ranges: list[tuple[int, int]], at: int, random: Any
) -> None:
    groups = share_checks([[read] for read, _ in kept(ranges)])
    random.shuffle(groups)
    damaged = bytearray(FILE)
    damaged[START + at] ^= 4

    told = performed(groups, Counted(bytes(damaged)))

    assert told == [False] * (len(ranges) - 1) + [True]


def test_parts_that_tile_a_range_read_each_byte_once() -> None:
    file = Counted(FILE)

    performed(share_checks([[read] for read, _ in kept([(0, 16), (16, 30), (46, 18)])]), file)

    assert file.nbytes == NBYTES


def test_other_reads_stay_as_they_are() -> None:
    (one, _), (two, _) = kept([(0, 8), (8, 8)])
    (alone, _), *_ = kept([(0, 8)])
    plain: Read = DirectRead(0, "f", 0, 8, Buffer(8), 0)
    elsewhere = CheckedRead(0, "g", START, NBYTES, RANGE, alone.parts, combined_crc32c)

    first, second = share_checks([[plain, one, elsewhere], [two]])

    assert (first[0], first[2]) == (plain, elsewhere)
    assert len(second) == 1


@pytest.mark.parametrize("n_groups", [1, 2])
def test_what_cannot_be_combined_is_read_whole_by_each(n_groups: int) -> None:
    reads = [read for read, _ in kept([(0, 8), (8, 8)], combine=None)]

    assert share_checks([reads[n:] for n in range(n_groups)]) == [tuple(reads[n:]) for n in range(n_groups)]


def test_a_short_range_is_read_by_one_call_and_a_segment_of_it_is_not() -> None:
    (one, first), (two, _) = kept([(0, 8), (8, 8)])
    ((segment,), _) = share_checks([[one], [two]])

    assert isinstance(segment, CheckedRead)
    assert one.is_short
    assert one.scratch_nbytes == NBYTES
    assert not segment.is_short
    whole = one.at_once()
    assert isinstance(whole, ScatterRead)
    assert (whole.offset, whole.nbytes, whole.crc32c) == (START, NBYTES, RANGE)
    whole.scatter(memoryview(FILE)[START : START + NBYTES])
    assert bytes(first.data) == FILE[START : START + 8]


def in_blocks(ranges: Sequence[tuple[int, int]]) -> tuple[CheckedRead, list[Buffer]]:
    """Make one read of all that is kept of the range, of whose blocks the checksums are known."""
    reads = kept(ranges, running=BLOCKS)
    parts = tuple([part for read, _ in reads for part in read.parts])
    return replace(reads[0][0], parts=parts), [buffer for _, buffer in reads]


def differ(reads: Sequence[Read], file: Counted) -> bool:
    """Perform reads, and say whether one of them finds other bytes than were written."""
    found = False
    for read in reads:
        if isinstance(read, CheckedRead):
            found |= read.differs(read.fill(file.read_at, crc32c))
        else:
            assert isinstance(read, DirectRead)
            file.read_at(read.offset, [read.into()])
            found |= crc32c(read.into()) != read.crc32c

    return found


def touched(ranges: Sequence[tuple[int, int]]) -> set[int]:
    """Return the bytes of the blocks that some ranges lie in."""
    kept_bytes = {byte for at, nbytes in ranges for byte in range(at, min(at + nbytes, NBYTES))}
    return {byte for byte in range(NBYTES) if byte // BLOCK in {kept // BLOCK for kept in kept_bytes}}


@given(st.lists(KEPT, min_size=1, max_size=5))
def test_blocks_of_which_nothing_is_kept_are_not_read(ranges: list[tuple[int, int]]) -> None:
    whole, buffers = in_blocks(ranges)
    reads, file = narrowed([whole]), Counted(FILE)

    assert not differ(reads, file)

    assert sum(read.nbytes for read in reads) == len(touched(ranges))
    for (at, _), buffer in zip(ranges, buffers, strict=True):
        assert bytes(buffer.data) == FILE[START + at : START + at + buffer.nbytes]


@given(st.lists(KEPT, min_size=1, max_size=5), st.integers(0, NBYTES - 1))
def test_a_flipped_bit_is_found_in_the_blocks_that_are_read(ranges: list[tuple[int, int]], at: int) -> None:
    damaged = bytearray(FILE)
    damaged[START + at] ^= 64

    found = differ(narrowed([in_blocks(ranges)[0]]), Counted(bytes(damaged)))

    assert found == (at in touched(ranges))


@given(st.lists(KEPT, min_size=2, max_size=5), st.integers(0, NBYTES - 1))
def test_a_range_that_is_shared_ends_with_the_last_block_that_somebody_keeps(
    ranges: list[tuple[int, int]], at: int
) -> None:
    reads = [read for read, _ in kept(ranges, running=BLOCKS)]
    wanted = range(min(touched(ranges)), max(touched(ranges)) + 1)
    damaged = bytearray(FILE)
    damaged[START + at] ^= 1

    groups = share_checks([[read] for read in reads])

    assert sum(read.nbytes for (read,) in groups) == len(wanted)
    assert not any(performed(groups, Counted(FILE)))
    assert any(performed(share_checks([[read] for read in reads]), Counted(bytes(damaged)))) == (at in wanted)


def test_what_is_just_one_part_is_read_like_any_other() -> None:
    (read,) = narrowed([in_blocks([(BLOCK, 2 * BLOCK)])[0]])

    assert isinstance(read, DirectRead)
    assert (read.offset, read.nbytes) == (START + BLOCK, 2 * BLOCK)
    assert read.crc32c == crc32c(FILE[START + BLOCK : START + 3 * BLOCK])


def test_reads_without_checksums_of_blocks_stay_as_they_are() -> None:
    reads = tuple([read for read, _ in kept([(0, 8), (8, 8)])])

    assert narrowed(reads) is reads
