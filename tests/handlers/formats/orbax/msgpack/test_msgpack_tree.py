"""The msgpack file of early Orbax: sound, damaged, and hostile."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from penstock.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.formats.leaf_table import MOST_LEVELS
from penstock.handlers.formats.orbax.embedded_arrays import ElementRun, PackedArray, number
from penstock.handlers.formats.orbax.msgpack_files import read_tree
from penstock.kernel import KeyKind

pytestmark = pytest.mark.anyio

M, S, T = KeyKind.MAPPING, KeyKind.SEQUENCE, KeyKind.TUPLE
CUBE = np.arange(60, dtype=np.int16).reshape(3, 4, 5)


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value, strict_types=True)
    return data


def array(value: Any, code: int = 1, **changed: Any) -> Any:
    parts = {"shape": list(value.shape), "dtype": value.dtype.name, "data": value.tobytes()} | changed
    return msgpack.ExtType(code, packed(list(parts.values())))


def chunked(value: Any, *at: int, order: tuple[int, ...] | None = None) -> Any:
    """The record of an array cut before each of `at`, its chunks stored in `order`."""
    chunks = dict(enumerate(np.split(value.reshape(-1), at)))
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(axis): n for axis, n in enumerate(value.shape)},
        "chunks": {str(i): array(chunks[i]) for i in order or chunks},
    }


def write(folder: Path, value: Any) -> Path:
    path = folder / "checkpoint"
    path.write_bytes(value if isinstance(value, bytes) else packed(value))
    return path


def read(folder: Path, value: Any) -> Any:
    return read_tree(LocalStore(), str(write(folder, value)))


def test_leaves_are_listed_with_their_types_and_places(tmp_path: Path) -> None:
    tree = {
        "a": [array(CUBE), "PLACEHOLDER://a.1", "AGGREGATED://x", "text"],
        "t": msgpack.ExtType(4, packed([1, msgpack.ExtType(4, packed([])), [None]])),
        "z": msgpack.ExtType(2, packed([1.5, -2])),
        3: array(np.float32(2.5), code=3),
    }

    found = read(tmp_path, tree)

    assert [(leaf.keys, leaf.kinds, leaf.typestr, leaf.elsewhere) for leaf in found] == [
        (("a", "0"), (M, S), "np.ndarray", False),
        (("a", "1"), (M, S), "np.ndarray", True),
        (("a", "2"), (M, S), "np.ndarray", True),
        (("a", "3"), (M, S), "string", False),
        (("t", "0"), (M, T), "scalar", False),
        (("t", "1"), (M, T), "Tuple", False),
        (("t", "2", "0"), (M, T, S), "None", False),
        (("z",), (M,), "scalar", False),
        (("3",), (M,), "scalar", False),
    ]
    data = (tmp_path / "checkpoint").read_bytes()
    (run,) = found[0].array.runs
    assert data[run.offset :].startswith(CUBE.tobytes())
    assert found[7].array.data == struct.pack("<dd", 1.5, -2)
    assert (found[8].array.dtype, found[8].array.shape) == ("float32", ())


@pytest.mark.parametrize("value", [0, -1, 127, 128, -32, -33, 255, 256, 2**31, 2**32, 2**63 - 1, -(2**63)])
def test_every_int(value: int, tmp_path: Path) -> None:
    (leaf,) = read(tmp_path, [value])

    assert np.frombuffer(leaf.array.data, leaf.array.dtype)[0] == value


def test_numbers_of_all_kinds() -> None:
    found = {value: number("f", value) for value in (True, 2**64 - 1, 1.5, 2j)}

    assert [array.dtype for array in found.values() if array] == ["bool", "uint64", "float64", "complex128"]
    assert number("f", 2**64) is None
    assert number("f", -(2**63) - 1) is None


@pytest.mark.thinned(4)
@pytest.mark.parametrize("piece_bytes", [2, 7, 1000])
@pytest.mark.parametrize("cuts", [(), (1,), (7, 20, 21), (5, 10, 40), (20, 40), (59,), (0, 60)])
@pytest.mark.parametrize(
    "bounds",
    [((0, 3), (0, 4), (0, 5)), ((1, 2), (1, 3), (2, 4)), ((0, 3), (2, 4), (0, 5)), ((2, 3), (3, 4), (4, 5))],
)
async def test_any_part_of_an_array_in_chunks(
    bounds: Any, cuts: tuple[int, ...], piece_bytes: int, tmp_path: Path, read_part: Any
) -> None:
    write(tmp_path, {"a": chunked(CUBE, *cuts, order=tuple(reversed(range(len(cuts) + 1))))})
    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path))
    (leaf,) = checkpoint.leaves

    found = await read_part(checkpoint, leaf, bounds, piece_bytes)

    np.testing.assert_array_equal(found, CUBE[tuple(slice(*bound) for bound in bounds)])


async def test_only_the_bytes_asked_for_are_read(tmp_path: Path) -> None:
    rows = np.zeros((100, 1000))
    write(tmp_path, {"a": chunked(rows, 30_000, 70_000)})
    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path))

    class Region:
        bounds = ((29, 32), (0, 1000))
        nbytes = 24_000

        def fresh(self) -> Region:
            raise NotImplementedError

        def view(self) -> memoryview:
            raise AssertionError

    reads = list(checkpoint.reads(0, checkpoint.leaves[0], Region(), 1 << 20))
    assert sum(read.nbytes for read in reads) == 24_000


def bad_arrays() -> dict[str, Any]:
    return {
        "too few parts": msgpack.ExtType(1, packed([[2], "int8"])),
        "no list": msgpack.ExtType(1, packed(3)),
        "shape no list": array(CUBE, shape=3),
        "shape of texts": array(CUBE, shape=["3"]),
        "negative shape": array(CUBE, shape=[-3, -4, 5]),
        "huge shape": array(CUBE, shape=[2**62, 2**62]),
        "bool in shape": array(CUBE, shape=[True, 4, 5]),
        "too short": array(CUBE, data=CUBE.tobytes()[:-1]),
        "too long": array(CUBE, data=CUBE.tobytes() + b"x"),
        "dtype no text": array(CUBE, dtype=3),
        "dtype object": array(CUBE, dtype="object"),
        "dtype str": array(CUBE, dtype="str96"),
        "data no bytes": array(CUBE, data=[1]),
        "33 axes": array(np.zeros((1,) * 33, np.int8)),
        "more behind it": msgpack.ExtType(1, array(CUBE).data + b"\xc0"),
        "scalar with axes": array(CUBE, code=3),
        "complex of one": msgpack.ExtType(2, packed([1.0])),
        "complex of texts": msgpack.ExtType(2, packed(["1", "2"])),
        "complex of nothing": msgpack.ExtType(2, b""),
        "tuple no list": msgpack.ExtType(4, packed({"a": 1})),
        "tuple cut short": msgpack.ExtType(4, packed([1, 2])[:-1]),
        "unknown": msgpack.ExtType(5, b"xx"),
        "timestamp": msgpack.Timestamp(3),
        "bytes": b"xx",
        "chunks lack one": {
            **chunked(CUBE, 7, 9),
            "chunks": {"0": array(CUBE.reshape(-1)), "2": array(CUBE)},
        },
        "no chunks": {**chunked(CUBE), "chunks": {}},
        "chunks of numbers": {**chunked(CUBE), "chunks": {"0": 60}},
        "chunks with axes": {**chunked(CUBE), "chunks": {"0": array(CUBE)}},
        "chunks of two dtypes": {
            **chunked(CUBE),
            "chunks": {"0": array(np.zeros(30, np.int16)), "1": array(np.zeros(30, np.int8))},
        },
        "chunks too short": {**chunked(CUBE), "chunks": {"0": array(np.zeros(59, np.int16))}},
        "shape of a chunked array": {**chunked(CUBE), "shape": {"0": 2.5}},
        "shape lacks an axis": {**chunked(CUBE), "shape": {"1": 60}},
        "negative shape of chunks": {**chunked(CUBE), "shape": {"0": -60}},
    }


@pytest.mark.parametrize("name", bad_arrays())
def test_a_bad_value_names_the_file_and_the_leaf(name: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"/checkpoint: .* \(leaf \['x'\]\[1\]") as caught:
        read(tmp_path, {"x": [1, bad_arrays()[name]]})
    assert (caught.value.key_path or "").startswith("['x'][1]")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "ends at byte 0"),
        (b"\xc1", "0xc1, which begins no msgpack value"),
        (packed(1) + b"\x00", "goes on behind its tree, which ends at byte 1"),
        (b"\xdd\xff\xff\xff\xff", "is longer"),
        (b"\xdf\xff\xff\xff\xff" + bytes(100), "is longer"),
        (b"\xdb\xff\xff\xff\xff", "is longer"),
        (b"\xc9\xff\xff\xff\xff\x01", "is longer"),
        (b"\x81\xa1\xff\x01", "is not UTF-8"),
        (packed({1.5: 1}), "neither a text nor an int"),
        (packed({True: 1}), "neither a text nor an int"),
        (packed({None: 1}), "neither a text nor an int"),
        (b"\x82\xa1a\x01\xa1a\x02", "'a' occurs twice"),
        (b"\x82\xa11\x01\x01\x02", "'1' occurs twice"),
    ],
)
def test_what_is_no_such_file_is_said(data: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=problem):
        read(tmp_path, data)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
def test_nesting_has_a_limit(opening: bytes, tmp_path: Path) -> None:
    (leaf,) = read(tmp_path, opening * MOST_LEVELS + b"\x01")
    assert len(leaf.keys) == MOST_LEVELS

    with pytest.raises(UnsupportedFormatError, match="nested more than 256 levels"):
        read(tmp_path, opening * 100_000 + b"\x01")


def test_nested_extensions_have_a_limit(tmp_path: Path) -> None:
    data = b"\x01"
    for _ in range(1000):
        data = packed(msgpack.ExtType(4, b"\x91" + data))

    with pytest.raises(UnsupportedFormatError, match="nested more than 256 levels"):
        read(tmp_path, data)


def test_long_keys_far_up_are_not_multiplied(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match="key paths take more than"):
        read(tmp_path, {"x" * 2**20: [0] * 1000})


def test_arrays_are_not_read_for_their_structure(tmp_path: Path) -> None:
    write(tmp_path, {f"{i}": array(np.zeros(2**20)) for i in range(4)})

    tracemalloc.start()
    leaves = OrbaxLayout().open(LocalStore(), str(tmp_path)).leaves
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(leaves) == 4
    assert peak < 2**20


WHOLE: Any = {
    "a": [array(CUBE), 1.5, None, {}],
    "c": chunked(CUBE, 7),
    "s": "text",
    "t": msgpack.ExtType(4, packed([1, array(np.float32(1), code=3)])),
}


def test_a_file_cut_short_anywhere_is_an_error(tmp_path: Path) -> None:
    data = packed(WHOLE)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match="/checkpoint: "):
            read(tmp_path, data[:length])


@pytest.mark.many_cases
@pytest.mark.parametrize(
    "first", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_file_with_any_byte_changed_opens_or_is_an_error_with_its_name(tmp_path: Path, first: int) -> None:
    data = packed(WHOLE)
    refused = 0
    for at in range(first, len(data), 3):
        for wrong in {0x00, 0x80, 0x91, 0xC0, 0xC1, 0xC9, 0xDB, 0xDD, 0xFF} - {data[at]}:
            write(tmp_path, data[:at] + bytes([wrong]) + data[at + 1 :])
            try:
                OrbaxLayout().open(LocalStore(), str(tmp_path))
            except CorruptCheckpointError as error:
                refused += 1
                assert "/checkpoint: " in str(error)  # noqa: PT017  # not every change is refused
    assert refused > len(data) / 3


def test_runs_are_covered_by_rectangles(tmp_path: Path) -> None:
    (leaf,) = read(tmp_path, [chunked(CUBE, 7)])

    assert isinstance(leaf.array, PackedArray)
    assert [(run.first, run.count) for run in leaf.array.runs] == [(0, 7), (7, 53)]
    assert all(isinstance(run, ElementRun) for run in leaf.array.runs)


def test_arrays_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = [("uint8", (6, 8)), ("int16", (6, 4)), ("uint8", (8, 6)), ("int8", (48,)), ("float32", (3, 4))]
    tree: dict[str, dict[str, Any]] = {
        f"layer_{at}": {
            f"{dtype}{shape}": rng.integers(0, 99, shape).astype(dtype) for dtype, shape in kinds if at % 7
        }
        | {"bias": rng.integers(0, 99, (200, 300)).astype("int16"), "empty": np.zeros((0, 3)), "n": at}
        for at in range(40)
    }
    packable = {
        name: {key: value if key == "n" else array(value) for key, value in inner.items()}
        for name, inner in tree.items()
    }
    found = {leaf.keys: leaf.array for leaf in read(tmp_path, packable)}
    content = (tmp_path / "checkpoint").read_bytes()

    assert set(found) == {(name, key) for name, inner in tree.items() for key in inner}
    for (name, key), packed_array in found.items():
        value = tree[name][key]
        if key == "n":
            assert packed_array == number(str(tmp_path / "checkpoint"), value)
            continue

        assert (packed_array.dtype, packed_array.shape) == (value.dtype.name, value.shape)
        runs = [(run.first, run.count) for run in packed_array.runs]
        assert runs == ([(0, value.size)] if value.size else [])
        if value.size:
            start = packed_array.runs[0].offset
            assert content[start : start + value.nbytes] == value.tobytes()


@pytest.mark.parametrize("cut", [1, 30, 60, 65, 70])
def test_an_array_like_the_one_before_is_cut_short(cut: int, tmp_path: Path) -> None:
    data = packed({"a": array(CUBE[0]), "b": array(CUBE[0]), "c": [array(CUBE[0])]})
    with pytest.raises(CorruptCheckpointError, match="ends at byte"):
        read(tmp_path, data[:-cut])


def test_an_array_like_the_one_before_must_fit_what_it_is_in(tmp_path: Path) -> None:
    inner = packed([array(CUBE[0])])
    short = msgpack.ExtType(4, inner[:-3])
    with pytest.raises(CorruptCheckpointError, match="longer"):
        read(tmp_path, packed({"a": array(CUBE[0]), "t": short, "z": "long enough to go on behind it"}))
