from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import (
    ChecksumError,
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    TruncatedDataError,
    UnsupportedFormatError,
)
from penstock.handlers import LocalStore
from penstock.handlers.ocdbt import wire_format as wire
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.handlers.ocdbt.database_writer import encode_files, encode_index
from penstock.handlers.ocdbt.index import Index, KeyTable, RememberedKeys
from penstock.handlers.ocdbt.wire_format import (
    MANIFEST_MAGIC,
    MISSING,
    NODE_MAGIC,
    Indirect,
    Inline,
    Value,
    seal,
    varint,
    varints,
)

Write = Callable[..., Path]
CONTENT = {b"inline": b"in", b"shared/a": b"0123456789", b"shared/b": b"9876543210", b"": b"nothing"}


def opened(directory: Path, context: Any = None, **options: Any) -> Any:
    base = {"driver": "file", "path": f"{directory}/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base, **options}, context=context).result()


def contents(directory: Path) -> dict[bytes, bytes]:
    """Read the index with penstock, and the values from where it says they are."""

    def resolve(value: Value) -> bytes:
        if isinstance(value, Inline):
            return value.value
        with (directory / value.file).open("rb") as file:
            file.seek(value.offset)
            return file.read(value.length)

    return {key: resolve(value) for key, value in read_index(LocalStore(), str(directory)).items()}


COMPRESSIONS = pytest.mark.parametrize("compression", [None, {"id": "zstd"}], ids=["plain", "zstd"])


@COMPRESSIONS
@pytest.mark.parametrize("max_decoded_node_bytes", [8 << 20, 300])
def test_reads_the_newest_version_that_tensorstore_wrote(
    tmp_path: Path, compression: Any, max_decoded_node_bytes: int
) -> None:
    config = {
        "compression": compression,
        "max_decoded_node_bytes": max_decoded_node_bytes,
        "max_inline_value_bytes": 4,
        "version_tree_arity_log2": 1,
    }
    store = opened(tmp_path, config=config)
    expected: dict[bytes, bytes] = {}
    for version in range(7):
        with ts.Transaction() as transaction:
            for i in range(60):
                key, value = b"a/%d/%d" % (i % 5, i), b"%d" % version * (i % 9)
                store.with_transaction(transaction)[key] = value
                expected[key] = value
        store[b"version"] = expected[b"version"] = b"%d" % version

    assert contents(tmp_path) == expected
    assert list(read_index(LocalStore(), str(tmp_path))) == sorted(expected)


@COMPRESSIONS
def test_reads_numbered_manifests(tmp_path: Path, compression: Any) -> None:
    store = opened(tmp_path, config={"compression": compression, "manifest_kind": "numbered"})
    for i in range(20):
        store[b"key %d" % i] = b"x" * 10 * i

    assert (tmp_path / "manifest.0000000000000013").exists()
    assert contents(tmp_path) == {b"key %d" % i: b"x" * 10 * i for i in range(20)}


@COMPRESSIONS
def test_reads_databases_without_keys(tmp_path: Path, compression: Any) -> None:
    store = opened(tmp_path, config={"compression": compression})
    store[b"a"] = b"b"
    store.delete_range(ts.KvStore.KeyRange()).result()

    assert read_index(LocalStore(), str(tmp_path)) == {}


@COMPRESSIONS
@pytest.mark.parametrize("folder", ["ocdbt.process_0", "with:colon %2f é~/deeper"])
def test_values_stay_where_a_merge_left_them(tmp_path: Path, compression: Any, folder: str) -> None:
    context = ts.Context()
    config = {"compression": compression, "max_inline_value_bytes": 4, "max_decoded_node_bytes": 200}
    child = opened(tmp_path / folder, context, config=config, value_data_prefix="v:%41/")
    for i in range(40):
        child[b"key/%d" % i] = b"x" * (i % 10)
    merged = opened(tmp_path, context, config=config)
    child.experimental_copy_range_to(merged).result()

    index = read_index(LocalStore(), str(tmp_path))

    references = [value for value in index.values() if isinstance(value, Indirect)]
    assert len(references) == 20
    assert all(reference.file.startswith(f"{folder}/v:%41/") for reference in references)
    assert contents(tmp_path) == {b"key/%d" % i: b"x" * (i % 10) for i in range(40)}


@COMPRESSIONS
@pytest.mark.parametrize("max_decoded_node_bytes", [8 << 20, 200])
def test_the_base_path_of_a_node_holds_for_all_below_it(
    tmp_path: Path, compression: Any, max_decoded_node_bytes: int
) -> None:
    config = {
        "compression": compression,
        "max_inline_value_bytes": 1,
        "max_decoded_node_bytes": max_decoded_node_bytes,
    }
    below = opened(tmp_path / "below", config=config)
    for i in range(40):
        below[b"key/%d" % i] = b"value %d" % i
    manifest = ts.ocdbt.dump(below.base).result()
    for version in manifest["versions"]:
        if location := version["root"].get("location"):
            version["root"]["location"] = location.replace("::", ":below/:")
    (tmp_path / "manifest.ocdbt").write_bytes(ts.ocdbt.undump_manifest(manifest))

    assert {
        value.file[:8]
        for value in read_index(LocalStore(), str(tmp_path)).values()
        if isinstance(value, Indirect)
    } == {"below/d/"}
    assert contents(tmp_path) == {b"key/%d" % i: b"value %d" % i for i in range(40)}
    assert opened(tmp_path)[b"key/7"] == b"value 7"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("max_node_bytes", [150, 8 << 20])
@pytest.mark.parametrize("n_keys", [0, 1, 2, 1000])
def test_reads_what_penstock_wrote(
    tmp_path: Path, write_database: Write, n_keys: int, max_node_bytes: int
) -> None:
    entries: dict[bytes, Value] = {
        b"key %d" % i: Indirect(f"d/{i % 3}", i << 34, i << 9) if i % 2 else Inline(b"v" * (i % 300))
        for i in range(n_keys)
    }
    write_database(tmp_path, entries.items(), max_node_bytes=max_node_bytes)

    index = read_index(LocalStore(), str(tmp_path))

    assert index == entries
    assert list(index) == sorted(entries)


def test_databases_with_the_same_keys_share_one_table_of_them(tmp_path: Path, write_database: Write) -> None:
    """Also if their nodes hold the beginning of the keys for the nodes below."""
    known = RememberedKeys()
    keys = [b"a/long/beginning/%03d" % i for i in range(100)]
    found: list[Index] = []
    for at in range(2):
        entries: list[tuple[bytes, Value]] = [(key, Indirect("d/0", at, 1)) for key in keys]
        write_database(tmp_path / str(at), entries, max_node_bytes=1000)
        found.append(read_index(LocalStore(), str(tmp_path / str(at)), known))

    assert list(found[0]) == keys
    assert found[0].table is found[1].table
    assert found[0] != found[1]


def test_equal_values_in_an_index_are_kept_once(tmp_path: Path, write_database: Write) -> None:
    entries: dict[bytes, Value] = {b"key %03d" % i: Inline(b"kind %d" % (i % 3)) for i in range(100)}
    write_database(tmp_path, entries.items(), max_node_bytes=300)
    index = read_index(LocalStore(), str(tmp_path))

    assert index == entries
    assert index.inline_nbytes == 600  # what is stored
    assert len(set(index.offsets.tolist())) == 3
    others = Index.of({**entries, b"key 007": Inline(b"kind 2")})
    assert len({index.content_key(), others.content_key()}) == 2


values = st.sampled_from([b"", b"a", b"b", b"ab", b"bb", b"a" * 1024])
runs = st.lists(st.tuples(values, st.sampled_from([1, 2, 63, 64, 65, 130]), st.booleans()), max_size=8)


@given(runs)
def test_an_index_has_its_values_however_many_equal_ones_follow_each_other(runs: list[Any]) -> None:
    kept = [(value, is_inline) for value, n, is_inline in runs for _ in range(n)]
    entries: dict[bytes, Value] = {
        b"%05d" % at: Inline(value) if is_inline else Indirect("d/0", at, len(value))
        for at, (value, is_inline) in enumerate(kept)
    }
    with tempfile.TemporaryDirectory() as directory:
        encoded = encode_index(
            entries.items(), node_file="d/n", node_offset=0, uuid=bytes(16), commit_time_ns=0
        )
        os.mkdir(f"{directory}/d")
        Path(directory, "d/n").write_bytes(encoded.nodes)
        Path(directory, "manifest.ocdbt").write_bytes(encoded.manifest)
        index = read_index(LocalStore(), directory)

    assert index == entries
    inline = {value for value, is_inline in kept if is_inline and value}
    there = index.inline_places(range(len(index)))
    assert len({place for place in there if place >= 0}) == len(inline)


few = st.integers(1, 6)
numbers = st.one_of(
    st.lists(st.integers(0, 30), max_size=12),
    st.builds(lambda first, step, n: [first + step * at for at in range(n)], few, few, few),
)


@given(numbers)
def test_rows_of_keys_are_found_at_equal_distances_and_elsewhere(wanted: list[int]) -> None:
    keys = [b"%02d" % number for number in range(0, 30, 2)]
    found = KeyTable(keys).find([b"%02d" % number for number in wanted])

    assert list(found) == [number // 2 if number % 2 == 0 and number < 30 else None for number in wanted]


letters = st.lists(st.sampled_from([b"a", b"\0", b"\xff", b"a" * 200]), max_size=5).map(b"".join)


@given(
    entries=st.dictionaries(
        st.one_of(letters, st.binary(max_size=8)),
        st.one_of(
            st.binary(max_size=300).map(Inline),
            st.builds(
                Indirect,
                st.sampled_from(["d/a", "d/ab", "ocdbt.process_7/d/a", "é"]),
                st.integers(0, 2**62),
                st.integers(0, 2**57),  # 40 of them can be added up
            ),
        ),
        max_size=40,
    ),
    max_node_bytes=st.sampled_from([1, 300, 8 << 20]),
)
def test_what_goes_in_comes_out(
    write_database: Write, entries: dict[bytes, Value], max_node_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_database(Path(directory), entries.items(), max_node_bytes=max_node_bytes)

        assert read_index(LocalStore(), directory) == entries


@pytest.mark.process
def test_what_penstock_wrote_is_read_without_tensorstore(tmp_path: Path, write_database: Write) -> None:
    write_database(tmp_path, [(b"k", Inline(b"v"))])
    program = (
        "import sys; from penstock.handlers.ocdbt.database_reader import read_index; "
        "from penstock.handlers.stores.local import LocalStore; "
        "assert len(read_index(LocalStore(), sys.argv[1])) == 1; print('tensorstore' in sys.modules)"
    )

    command = [sys.executable, "-c", program, str(tmp_path)]
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=True
    )

    assert done.stdout == "False\n"


# From here on: databases that are not as they were written.


@pytest.fixture(params=["penstock", "plain", "zstd"])
def database(request: pytest.FixtureRequest, tmp_path: Path, write_database: Write) -> Path:
    """A small database with nodes on two levels and values of both kinds."""
    if request.param == "penstock":
        entries: dict[bytes, Value] = {
            key: Indirect("d/nodes", 0, 4) if len(value) == 10 else Inline(value)
            for key, value in CONTENT.items()
        }
        write_database(tmp_path, entries.items(), files={"d/nodes": b"0123"}, max_node_bytes=100)
    else:
        config = {
            "compression": None if request.param == "plain" else {"id": "zstd"},
            "max_inline_value_bytes": 8,
            "max_decoded_node_bytes": 60,
        }
        with ts.Transaction(atomic=True) as transaction:
            store = opened(tmp_path, config=config, assume_config=True).with_transaction(transaction)
            for key, value in CONTENT.items():
                store[key] = value

    return tmp_path


def files_of(database: Path) -> list[Path]:
    return [database / "manifest.ocdbt", *(database / "d").iterdir()]


def damaged(path: Path, change: Callable[[bytes, int], bytes]) -> Iterator[int]:
    """Damage a file in place at one position after the other, and put it right again."""
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(change(whole, position))
        yield position
    path.write_bytes(whole)


@pytest.mark.thinned(3)
@pytest.mark.many_cases
@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_a_flipped_bit_is_an_error_or_makes_no_difference(database: Path, bits: int) -> None:
    expected = read_index(LocalStore(), str(database))
    errors: list[tuple[Path, CorruptCheckpointError]] = []

    def flip(whole: bytes, position: int) -> bytes:
        return whole[:position] + bytes([whole[position] ^ bits]) + whole[position + 1 :]

    for path in files_of(database):
        for _ in damaged(path, flip):
            try:
                index = read_index(LocalStore(), str(database))
            except CorruptCheckpointError as error:
                errors.append((path, error))
            else:
                assert index == expected  # it hit a value, or an earlier version

    assert len(errors) > 200
    assert all(error.path == str(path) for path, error in errors)
    assert read_index(LocalStore(), str(database)) == expected


def test_a_manifest_cut_anywhere_is_truncated(database: Path) -> None:
    for position in damaged(database / "manifest.ocdbt", lambda whole, position: whole[:position]):
        with pytest.raises(TruncatedDataError) as caught:
            read_index(LocalStore(), str(database))
        assert caught.value.path == str(database / "manifest.ocdbt")
        assert caught.value.found == position


def test_a_node_file_cut_anywhere_is_truncated(database: Path) -> None:
    expected = read_index(LocalStore(), str(database))
    found: list[tuple[str, int]] = []
    cuts: list[tuple[str, int]] = []
    for path in files_of(database)[1:]:
        for position in damaged(path, lambda whole, position: whole[:position]):
            try:
                index = read_index(LocalStore(), str(database))
            except TruncatedDataError as error:
                found.append((error.path, error.found))
                cuts.append((str(path), position))
            else:
                assert index == expected

    assert len(found) > 50
    assert found == cuts


def test_bytes_behind_a_manifest_are_an_error(database: Path) -> None:
    manifest = database / "manifest.ocdbt"
    manifest.write_bytes(manifest.read_bytes() + b"\0")

    with pytest.raises(CorruptCheckpointError, match=r"manifest\.ocdbt.*its header says"):
        read_index(LocalStore(), str(database))


def test_a_missing_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotACheckpointError, match=r"manifest\.ocdbt"):
            read_index(LocalStore(), str(directory))


def test_missing_data_files_are_named(database: Path) -> None:
    shutil.rmtree(database / "d")

    with pytest.raises(CorruptCheckpointError, match=f"{database}/d/.*No such file") as caught:
        read_index(LocalStore(), str(database))
    assert not isinstance(caught.value, NotACheckpointError)


def test_directories_in_place_of_files_are_corrupt(database: Path) -> None:
    for path in files_of(database):
        path.unlink()
        path.mkdir()
        with pytest.raises(CorruptCheckpointError, match="directory"):
            read_index(LocalStore(), str(database))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reading fails")
def test_a_failing_medium_is_not_corruption(tmp_path: Path) -> None:
    (tmp_path / "manifest.ocdbt").symlink_to("/proc/self/mem")  # address 0 is never mapped: EIO

    with pytest.raises(StorageError) as caught:
        read_index(LocalStore(), str(tmp_path))

    assert caught.value.errno == errno.EIO
    assert caught.value.path.endswith("manifest.ocdbt")


def test_a_checksum_error_says_which_node(tmp_path: Path, write_database: Write) -> None:
    nodes = write_database(tmp_path, [(b"k", Inline(b"value"))], files={"d/nodes": b"12345"})
    nodes.write_bytes(nodes.read_bytes().replace(b"value", b"Value"))

    with pytest.raises(ChecksumError, match="d/nodes: B\\+tree node at byte 5: checksum mismatch"):
        read_index(LocalStore(), str(tmp_path))


# From here on: databases whose checksums are right, and which nobody should have written.

NODE_FILE = encode_files(["d/n"])
CONFIG = bytes(16) + b"\0" + varints((1024, 8 << 20)) + b"\x04\0"


def manifest_body(*, height: int = 0, offset: int = 0, length: int, n_keys: int = 1) -> bytes:
    root = varints((0, offset, length, n_keys, length, 0))
    return CONFIG + NODE_FILE + varints((1, 1)) + bytes([height]) + root + bytes(8) + b"\0"


def build(directory: Path, node: bytes, manifest: bytes | None = None, *, height: int = 0) -> str:
    sealed = seal(NODE_MAGIC, node)
    (directory / "d").mkdir(exist_ok=True)
    (directory / "d" / "n").write_bytes(sealed)
    body = manifest_body(height=height, length=len(sealed)) if manifest is None else manifest
    (directory / "manifest.ocdbt").write_bytes(seal(MANIFEST_MAGIC, body))
    return str(directory)


def leaf(*columns: bytes, files: bytes = NODE_FILE) -> bytes:
    return b"".join((b"\0", files, *columns))


ONE = leaf(b"\x01", b"\x01", b"k", b"\x01", b"\0", b"v")
WIDE = varint(2**64)


def test_the_handmade_node_itself_is_fine(tmp_path: Path) -> None:
    assert read_index(LocalStore(), build(tmp_path, ONE)) == {b"k": Inline(b"v")}


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        (b"", "ends 1 bytes too early"),
        (leaf(b"\0"), "0 entries"),
        (leaf(varint(2**20 + 1)), "1048577 entries"),
        (leaf(varint(2**20)), "too early"),
        (leaf(b"\x01", b"\x05", b"k"), "too early"),
        (leaf(b"\x01", varint(2**63), b"k"), "key of"),
        (leaf(b"\x01", varint(70_000), bytes(70_000), b"\0\0"), "key of 70000 bytes"),
        (leaf(b"\x01", WIDE, b"k"), "64 bits"),
        (leaf(b"\x01", b"\xff" * 9 + b"\x7f", b"k"), "64 bits"),
        (leaf(b"\x01", b"\xff" * 40), "64 bits"),
        (leaf(b"\x01", b"\xff"), "within a number"),
        (leaf(b"\x02", b"\x05", b"\x01\x01", b"kl", b"\0\0", b"\0\0"), "shares more"),
        (leaf(b"\x02", b"\0", b"\x01\x01", b"ba", b"\0\0", b"\0\0"), "ascending"),
        (leaf(b"\x02", b"\x01", b"\x01\0", b"a", b"\0\0", b"\0\0"), "ascending"),
        (leaf(b"\x01", b"\x01", b"k", b"\x01", b"\x02", b"v"), "kind 2"),
        (leaf(b"\x01", b"\x01", b"k", b"\x05", b"\0", b"v"), "too early"),
        (leaf(b"\x01", b"\x01", b"k", b"\x01", b"\x01", b"\x01", b"\0"), "does not name"),
        (leaf(b"\x01", b"\x01", b"k", b"\x01", b"\x01", b"\0", varint(2**63 - 1)), "9223372036854775807"),
        (ONE + b"\0", "1 bytes left over"),
        (b"\x01" + ONE[1:], "inherits more"),
        (leaf(b"\x01", b"\x01k\x01\x01\0\0", files=b"\x01\0\0"), "does not name"),
        (leaf(files=b"\x01\x03\x04abc"), "impossible lengths"),
        (leaf(files=b"\x02\x04\x03\x01\0\0abcd"), "impossible lengths"),
        (leaf(files=b"\x02\x02\x03\x01\0\x01abcd"), "base"),
        (leaf(files=varint(2**40)), "too early"),
        (leaf(files=b"\x01" + varint(70_000) + b"\0" + b"a" * 70_000), "impossible lengths"),
        (leaf(files=b"\x01\x01\0\xff"), "UTF-8"),
        (leaf(files=b"\x01\x06\0../x/y"), "plain relative path"),
        (leaf(files=b"\x01\x02\0/x"), "plain relative path"),
        (leaf(files=b"\x01\x02\0x\0"), "plain relative path"),
    ],
)
def test_a_malformed_node_is_corrupt(tmp_path: Path, node: bytes, problem: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"(?s)d/n: B.tree node at byte 0: .*({problem})"):
        read_index(LocalStore(), build(tmp_path, node))


def test_something_else_in_place_of_a_node_is_corrupt(tmp_path: Path) -> None:
    directory = build(tmp_path, ONE)
    (tmp_path / "d" / "n").write_bytes(seal(MANIFEST_MAGIC, ONE))

    with pytest.raises(CorruptCheckpointError, match="starts with 0cdb3a2a, not 0cdb20de"):
        read_index(LocalStore(), directory)


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (b"", "too early"),
        (bytes(16) + b"\x02" + CONFIG[17:], "kind 2"),
        (CONFIG[:-1] + b"\x07", "compression method 7"),
        (bytes(16) + b"\x01" + CONFIG[17:], "numbered manifests, and there is none"),
        (CONFIG + NODE_FILE + b"\0\0", "without versions"),
        (CONFIG + b"\0" + manifest_body(length=40)[len(CONFIG + NODE_FILE) :], "data file 0 of 0"),
        (manifest_body(length=40) + b"\0", "left over"),
        (manifest_body(length=40)[:-1] + b"\x01", "too early"),
        (manifest_body(length=17), "17 bytes cannot hold a node"),
        (manifest_body(length=2**62, offset=2**62), "ends at byte .*, but 9223372036854775808 are needed"),
        (manifest_body(length=MISSING, offset=0), "are needed"),
        (manifest_body(length=len(ONE) + 18, n_keys=2), "says 2 keys, but the index holds 1"),
        (manifest_body(length=len(ONE) + 18, n_keys=0), "says 0 keys, but the index holds 1"),
        (manifest_body(length=len(ONE) + 18, height=1), "height 0, but its parent says 1"),
        (
            CONFIG + NODE_FILE + b"\x02\x02\x01" + bytes(2 * 7 + 16 + 1),
            "versions are not in ascending order",
        ),
    ],
)
def test_a_malformed_manifest_is_corrupt(tmp_path: Path, manifest: bytes, problem: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=problem):
        read_index(LocalStore(), build(tmp_path, ONE, manifest))


def interior(height: int, *children: tuple[bytes, int, int, int], inherited: int = 0) -> bytes:
    """Encode children given as key, offset, length and number of keys; every key in full."""
    count = len(children)
    keys, offsets, lengths, n_keys = zip(*children, strict=True)
    columns = (
        bytes([height]),
        NODE_FILE,
        varint(count),
        bytes(count - 1),
        varints([len(key) for key in keys]),
        bytes([inherited]) * count,
        b"".join(keys),
        bytes(count),
        varints(offsets),
        varints(lengths),
        varints(n_keys),
        varints(lengths),
        bytes(count),
    )
    return b"".join(columns)


def test_a_node_that_is_its_own_child_is_corrupt(tmp_path: Path) -> None:
    length = len(interior(3, (b"", 0, 60, 1))) + 18

    with pytest.raises(CorruptCheckpointError, match="height 3, but its parent says 2"):
        read_index(LocalStore(), build(tmp_path, interior(3, (b"", 0, length, 1)), height=3))


def test_a_child_that_inherits_too_much_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="inherits more"):
        read_index(LocalStore(), build(tmp_path, interior(1, (b"k", 0, 60, 1), inherited=2), height=1))


def test_a_child_without_a_node_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="a child without a node"):
        read_index(LocalStore(), build(tmp_path, interior(1, (b"k", MISSING, MISSING, 1)), height=1))


def test_leaves_that_overlap_are_corrupt(tmp_path: Path) -> None:
    child = seal(NODE_MAGIC, ONE)
    node = seal(NODE_MAGIC, interior(1, (b"a", 0, len(child), 1), (b"k", 0, len(child), 1)))
    manifest = manifest_body(height=1, offset=len(child), length=len(node), n_keys=2)
    directory = build(tmp_path, ONE, manifest)
    (tmp_path / "d" / "n").write_bytes(child + node)

    with pytest.raises(CorruptCheckpointError, match="comes after"):
        read_index(LocalStore(), directory)


def test_a_leaf_under_several_prefixes_is_corrupt(tmp_path: Path) -> None:
    # Each prefix makes other keys of the same leaf, so a small file would hold any number of them.
    child = seal(NODE_MAGIC, ONE)
    children = [(bytes([97 + at]), 0, len(child), 1) for at in range(20)]
    node = seal(NODE_MAGIC, interior(1, *children, inherited=1))
    manifest = manifest_body(height=1, offset=len(child), length=len(node), n_keys=20)
    directory = build(tmp_path, ONE, manifest)
    (tmp_path / "d" / "n").write_bytes(child + node)

    with pytest.raises(CorruptCheckpointError, match="nodes that lie in one another"):
        read_index(LocalStore(), directory)


def test_keys_that_repeat_those_before_them_have_a_limit(tmp_path: Path) -> None:
    count, longest = 5000, 60000
    first, rest = b"k" * longest, b"\0" * (count - 1)
    shared = varints([longest] + [longest + at for at in range(count - 2)])
    suffixes = varints([longest] + [1] * (count - 1))
    node = leaf(varint(count), shared, suffixes, first, rest, bytes(count), bytes(count))

    with pytest.raises(CorruptCheckpointError, match=r"keys of 3.* bytes, of at most"):
        read_index(LocalStore(), build(tmp_path, node))


def test_more_keys_than_bytes_are_not_looked_for(tmp_path: Path) -> None:
    manifest = manifest_body(length=len(seal(NODE_MAGIC, ONE)), n_keys=1_000_000)

    with pytest.raises(CorruptCheckpointError, match="bytes cannot hold 1000000 keys"):
        read_index(LocalStore(), build(tmp_path, ONE, manifest))


def test_a_tree_that_multiplies_is_given_up_early(tmp_path: Path) -> None:
    nodes = seal(NODE_MAGIC, ONE)
    offset, length = 0, len(nodes)
    for height in range(1, 60):
        twice = interior(height, (b"a", offset, length, 1), (b"b", offset, length, 1), inherited=1)
        offset, node = len(nodes), seal(NODE_MAGIC, twice)
        length = len(node)
        nodes += node
    directory = build(tmp_path, ONE, manifest_body(height=59, offset=offset, length=length, n_keys=5))
    (tmp_path / "d" / "n").write_bytes(nodes)

    with pytest.raises(CorruptCheckpointError, match="nodes that lie in one another"):
        read_index(LocalStore(), directory)


def test_an_uncompressed_manifest_may_configure_compression(tmp_path: Path) -> None:
    plain = manifest_body(length=len(ONE) + 18)
    directory = build(tmp_path, ONE, CONFIG[:-1] + b"\x01\0\0\0\0" + plain[len(CONFIG) :])

    assert read_index(LocalStore(), directory) == {b"k": Inline(b"v")}


def test_a_later_format_is_named_as_such(tmp_path: Path, write_database: Write) -> None:
    write_database(tmp_path, [(b"k", Inline(b"v"))])
    manifest = tmp_path / "manifest.ocdbt"
    for position, words in [(12, "format version 3"), (13, "compression method 3")]:
        later = bytearray(manifest.read_bytes()[:-4])
        original = later[position]
        later[position] = 3
        manifest.write_bytes(bytes(later) + crc32c(bytes(later)).to_bytes(4, "little"))
        with pytest.raises(UnsupportedFormatError, match=words):
            read_index(LocalStore(), str(tmp_path))
        later[position] = original
        manifest.write_bytes(bytes(later) + crc32c(bytes(later)).to_bytes(4, "little"))


@pytest.mark.many_cases
@given(data=st.data())
def test_damage_under_a_right_checksum_never_escapes_as_another_error(
    write_database: Write, data: st.DataObject
) -> None:
    entries = [(b"key %d" % i, Indirect("d/nodes", i, 200) if i % 2 else Inline(b"v")) for i in range(12)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        nodes = write_database(directory, entries, max_node_bytes=data.draw(st.sampled_from([300, 8 << 20])))
        path, magic = data.draw(
            st.sampled_from([(nodes, NODE_MAGIC), (directory / "manifest.ocdbt", MANIFEST_MAGIC)])
        )
        whole = path.read_bytes()
        start = whole.rindex(magic)  # the manifest, or the root node
        body = bytearray(whole[start + 14 : -4])
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, len(body) - 1))
            body[position] = data.draw(st.one_of(st.integers(0, 3), st.integers(0, 255)))
        path.write_bytes(whole[:start] + seal(magic, bytes(body)))

        try:
            index = read_index(LocalStore(), name)
        except CorruptCheckpointError:
            return

    assert all(isinstance(key, bytes) for key in index)
    assert list(index) == sorted(index)


@pytest.mark.many_cases
@given(in_manifest=st.booleans(), where=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_damage_under_a_right_checksum_in_a_compressed_node(
    in_manifest: bool, where: float, value: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = opened(Path(name), assume_config=True, config={"compression": {"id": "zstd"}})
        with ts.Transaction(atomic=True) as transaction:
            for i in range(12):
                store.with_transaction(transaction)[b"key %d" % i] = b"v" * 20 * i
        root = ts.ocdbt.dump(store.base).result()["versions"][-1]["root"]["location"]
        _, _, nodes, offset, _ = root.split(":")
        path = Path(name, "manifest.ocdbt" if in_manifest else nodes)
        start = 0 if in_manifest else int(offset)
        whole = path.read_bytes()
        part = bytearray(whole[start:-4])
        part[14 + int(where * (len(part) - 14))] = value
        path.write_bytes(whole[:start] + bytes(part) + crc32c(bytes(part)).to_bytes(4, "little"))

        try:
            index = read_index(LocalStore(), name)
        except CorruptCheckpointError:
            return

    assert list(index) == sorted(index)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=17, max_size=60), st.binary(max_size=20))
def test_a_column_of_numbers_is_read_alike_all_at_once_and_one_by_one(
    numbers: list[int], behind: bytes
) -> None:
    encoded = b"".join(map(wire.varint, numbers))
    origin = wire.Origin("path", "part")
    cursor = wire.Cursor(origin, encoded + behind, 0, len(encoded) + len(behind))

    assert list(cursor.varints(len(numbers))) == numbers
    assert cursor.take(len(behind)) == behind
    cursor.finish()


@pytest.mark.parametrize(
    ("encoded", "problem"),
    [
        (b"\x80" * 20 + b"\x00" * 30, "more than 64 bits"),
        (b"\xff" * 9 + b"\x02" + b"\x00" * 40, "more than 64 bits"),
        (b"\x01" * 25 + b"\x80" * 5, "ends within a number"),
        (b"\x81\x01" * 15, "ends within a number"),
    ],
)
def test_a_column_of_impossible_numbers_is_corrupt(encoded: bytes, problem: str) -> None:
    cursor = wire.Cursor(wire.Origin("path", "part"), encoded, 0, len(encoded))
    with pytest.raises(CorruptCheckpointError, match=problem):
        cursor.varints(30)


def test_numbers_of_64_bits_are_read_in_a_column() -> None:
    numbers = [2**64 - 1, 0, 2**63] * 10
    encoded = b"".join(map(wire.varint, numbers))
    assert wire.Cursor(wire.Origin("path", "part"), encoded, 0, len(encoded)).varints(30) == numbers
