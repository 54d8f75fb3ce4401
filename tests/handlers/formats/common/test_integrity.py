"""Checksums in columns, of both versions, and every way in which they can be wrong."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptCheckpointError
from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Checksum, Checksums

PIECES = [(0, 10, 1), (10, 5, 2**32 - 1), (4096, 2**40, 3)]


def columns(pieces: list[tuple[int, int, int]] = PIECES) -> dict[str, bytes]:
    rows = list(zip(*pieces, strict=True)) or [(), (), ()]
    return {
        "offsets": np.array(rows[0], "<u8").tobytes(),
        "nbytes": np.array(rows[1], "<u8").tobytes(),
        "crc32c": np.array(rows[2], "<u4").tobytes(),
    }


def document(version: int, file: Any) -> bytes:
    return msgpack.packb({"version": version, "files": {"d/a": file}})


@pytest.mark.parametrize("data", [document(1, PIECES[::-1]), document(2, columns())], ids=["1", "2"])
def test_both_versions_of_checksum_columns_are_read(data: bytes) -> None:
    found = integrity.decode("p", data).files

    assert list(found) == ["d/a"]
    assert list(found["d/a"]) == PIECES
    assert found["d/a"][1] == Checksum(10, 5, 2**32 - 1)
    assert found["d/a"][1:] == tuple(PIECES[1:])
    assert len(found["d/a"]) == 3


def test_a_file_without_pieces() -> None:
    (found,) = integrity.decode("p", document(2, columns([]))).files.values()
    assert list(found) == []
    assert found.exactly(np.array([0, 5]), np.array([1, 1])).tolist() == [-1, -1]
    assert found.from_offset(3) == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"offsets": b"1234567"}, "no column of numbers"),
        ({"nbytes": 3}, "no column of numbers"),
        ({"crc32c": None}, "no column of numbers"),
        ({"crc32c": b"12345"}, "no column of numbers"),
        ({"crc32c": b"1234"}, "columns of 3, 3 and 1 entries"),
        ({"offsets": b"12345678"}, "columns of 1, 3 and 3 entries"),
        ({"offsets": np.array([5, 4, 6], "<u8").tobytes()}, "not in ascending order"),
    ],
)
def test_columns_that_are_wrong(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"p: 'd/a' has .*{problem}"):
        integrity.decode("p", document(2, {**columns(), **change}))


@pytest.mark.parametrize("entry", [[1, 2], [1, 2, 2**32], [-1, 2, 3], ["1", 2, 3], 7, [2**64, 1, 1]])
def test_entries_of_the_first_version_that_are_wrong(entry: Any) -> None:
    if isinstance(entry, list) and 2**64 in entry:
        entry = [2.0**64, 1, 1]  # msgpack has no larger integer
    with pytest.raises(CorruptCheckpointError, match="p: 'd/a' has an entry"):
        integrity.decode("p", document(1, [[0, 1, 2], entry]))


@pytest.mark.parametrize("version", [0, -1, True, "2", None])
def test_versions_that_are_none(version: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="is of version"):
        integrity.decode("p", document(version, columns()))


pieces = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2**32 - 1)), min_size=1, max_size=20)


@given(pieces, st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=20))
def test_ranges_are_looked_up(found: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    starts = np.cumsum([0, *[nbytes for nbytes, _ in found]]).tolist()
    rows = [(start, nbytes, crc) for start, (nbytes, crc) in zip(starts, found, strict=False)]
    checksums = Checksums.of(rows)
    by_range = {(start, nbytes): crc for start, nbytes, crc in rows}
    asked = [*asked, *by_range]

    offsets, lengths = (np.array([pair[at] for pair in asked], np.int64) for at in (0, 1))

    assert checksums.exactly(offsets, lengths).tolist() == [by_range.get(pair, -1) for pair in asked]
    for start, _ in asked:
        at = checksums.from_offset(start)
        assert all(offset < start for offset, _, _ in rows[:at])
        assert all(offset >= start for offset, _, _ in rows[at:])


def blocks(sizes: list[int], running: list[int]) -> dict[str, bytes]:
    return {
        "block_bytes": np.array(sizes, "<u4").tobytes(),
        "running": np.array(running, "<u4").tobytes(),
    }


SHORT = [(0, 10, 1), (10, 5, 2), (20, 6, 3)]


def test_what_is_known_of_blocks_is_read() -> None:
    record = document(2, {**columns(SHORT), **blocks([4, 0, 3], [7, 8, 9])})
    (found,) = integrity.decode("p", record).files.values()

    assert list(found) == SHORT
    told = [found.running_of(at) for at in range(3)]
    assert [None if one is None else (one.block_bytes, list(one.crc32cs)) for one in told] == [
        (4, [7, 8]),
        None,
        (3, [9]),
    ]
    assert found.have_blocks(np.array([0, 10, 20])).tolist() == [True, False, True]
    assert integrity.columns(SHORT, found) == {**columns(SHORT), **blocks([4, 0, 3], [7, 8, 9])}


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_bytes": b"123"},
        {"running": b"123"},
        {"running": None},
        {"block_bytes": None},
        blocks([4, 0], [7, 8]),
        blocks([4, 0, 3], [7, 8]),
        blocks([4, 0, 3], [7, 8, 9, 10]),
        blocks([0, 0, 0], [7]),
        blocks([1, 1, 1], []),
    ],
)
def test_blocks_that_do_not_fit_the_pieces(wrong: dict[str, Any]) -> None:
    file = {**columns(SHORT), **blocks([4, 0, 3], [7, 8, 9]), **wrong}
    with pytest.raises(CorruptCheckpointError, match=r"'d/a' has .* do not fit its pieces"):
        integrity.decode("p", document(2, {name: value for name, value in file.items() if value is not None}))


def test_blocks_of_a_piece_larger_than_any_do_not_fit() -> None:
    file = {**columns([(0, 2**63, 1)]), **blocks([2**31], [])}
    with pytest.raises(CorruptCheckpointError, match="do not fit its pieces"):
        integrity.decode("p", document(2, file))


def test_a_document_with_long_columns_is_that_of_one_call() -> None:
    long, short = bytes(range(256)) * 5000, {"offsets": b"12345678", "nbytes": b"abcdefgh", "crc32c": b"1234"}
    files = {"d/a": short, "d/b": {"offsets": long, "nbytes": long, "crc32c": long[: len(long) // 2]}}
    members = {"version": 2, "files": files, "digests": {"w": b"digest"}, "about": {"is": [long, None, {}]}}

    found = integrity.encode_files(files, {"w": b"digest"}, {}, {"is": [long, None, {}]})
    assert found == msgpack.packb(members)
