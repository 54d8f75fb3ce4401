from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.handlers.ocdbt.database_writer import EncodedIndex, encode_index
from penstock.handlers.ocdbt.wire_format import (
    MAX_INLINE_BYTES,
    MAX_KEY_BYTES,
    MAX_OFFSET,
    Indirect,
    Inline,
    Value,
)

UUID = bytes(range(16))
Write = Callable[..., Path]


def encode(entries: list[tuple[bytes, Value]], **options: Any) -> EncodedIndex:
    plain: dict[str, Any] = {"node_file": "d/nodes", "node_offset": 0, "uuid": UUID, "commit_time_ns": 1}
    return encode_index(entries, **{**plain, **options})


def base_of(directory: Path) -> Any:
    return ts.KvStore.open({"driver": "file", "path": f"{directory}/"}).result()


def opened(directory: Path) -> Any:
    return ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}).result()


def listed(store: Any, *key_range: bytes) -> list[bytes]:
    """List keys; TensorStore lists leaf after leaf, in the order in which they arrive."""
    return sorted(store.list(ts.KvStore.KeyRange(*key_range)).result())


def read_all(store: Any, keys: list[bytes]) -> list[bytes]:
    pending = [store.read(key) for key in keys]
    return [read.result().value for read in pending]


def walk(base: Any, entry: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yield each node's encoded size, its content and what its parent says, children first."""
    location = entry["location"]
    node = ts.ocdbt.dump(base, location).result()
    for child in node["entries"] if node["height"] else ():
        yield from walk(base, child)
    yield int(location.rpartition(":")[2]), node, entry


def arrays(n_keys: int) -> tuple[dict[bytes, Value], dict[bytes, bytes], dict[str, bytes]]:
    """Metadata inline and chunks in three data files, one of them of another process."""
    names: tuple[str, ...] = ("d/nodes", "d/0123", "ocdbt.process_1/d/4567")
    files: dict[str, bytes] = dict.fromkeys(names, b"")
    chunks: dict[str, list[bytes]] = {name: [] for name in names}
    ends = dict.fromkeys(names, 0)
    entries: dict[bytes, Value] = {}
    expected: dict[bytes, bytes] = {}
    for i in range(n_keys):
        if i % 2:
            key, content = b"params.layer_%d.kernel/0.0" % (i // 2), b"%d" % i * (1 + i % 60)
            name = names[i // 2 % 3]
            entries[key] = Indirect(name, ends[name], len(content))
            chunks[name].append(content)
            ends[name] += len(content)
        else:
            key, content = b"params.layer_%d.kernel/.zarray" % (i // 2), b'{"shape":[%d]}' % i * (i % 20)
            entries[key] = Inline(content)
        expected[key] = content

    for name in names:
        files[name] = b"".join(chunks[name])
    return entries, expected, files


@pytest.mark.thinned(2)
@pytest.mark.many_cases
@pytest.mark.parametrize("max_node_bytes", [8 << 20, 2000])
@pytest.mark.parametrize("n_keys", [1, 2, 1000, 12_000])
def test_tensorstore_reads_every_key(
    tmp_path: Path, write_database: Write, n_keys: int, max_node_bytes: int
) -> None:
    entries, expected, files = arrays(n_keys)
    write_database(tmp_path, entries.items(), files=files, max_node_bytes=max_node_bytes)

    store = opened(tmp_path)

    keys = sorted(expected)
    assert listed(store) == keys
    assert read_all(store, keys) == [expected[key] for key in keys]
    assert store.read(b"params.layer_0.kernel").result().state == "missing"
    assert store.read(keys[-1] + b"\0").result().state == "missing"


def test_tensorstore_reads_a_database_without_keys(tmp_path: Path, write_database: Write) -> None:
    nodes = write_database(tmp_path, [])

    assert nodes.read_bytes() == b""
    assert listed(opened(tmp_path)) == []


def test_tensorstore_lists_ranges_of_a_tree_of_three_levels(tmp_path: Path, write_database: Write) -> None:
    entries, expected, files = arrays(1000)
    write_database(tmp_path, entries.items(), files=files, max_node_bytes=2000)
    store = opened(tmp_path)
    keys = sorted(expected)

    for low, high in [(0, 1), (3, 500), (17, 18), (400, 999), (998, 999)]:
        assert listed(store, keys[low], keys[high]) == keys[low:high]

    assert listed(store, b"q") == []


@pytest.mark.parametrize("max_node_bytes", [400, 2000])
def test_nodes_have_the_size_asked_for_and_true_statistics(
    tmp_path: Path, write_database: Write, max_node_bytes: int
) -> None:
    entries = {
        b"key/%05d" % i: Indirect("d/chunks", 7 * i, 7) if i % 3 else Inline(b"%d" % i) for i in range(2000)
    }
    write_database(tmp_path, entries.items(), max_node_bytes=max_node_bytes)
    base = base_of(tmp_path)
    version = ts.ocdbt.dump(base).result()["versions"][-1]

    nodes = list(walk(base, version["root"]))

    assert version["root_height"] >= 2
    assert nodes[-1][1]["height"] == version["root_height"]
    assert all(nbytes <= max_node_bytes for nbytes, _, _ in nodes)
    leaves = [(nbytes, node) for nbytes, node, _ in nodes if not node["height"]]
    assert min(nbytes for nbytes, _ in leaves[:-1]) > max_node_bytes // 5
    for _, _, entry in nodes:
        below = list(walk(base, entry))
        values = [value for _, node, _ in below if not node["height"] for value in node["entries"]]
        assert entry["statistics"] == {
            "num_keys": len(values),
            "num_tree_bytes": sum(nbytes for nbytes, _, _ in below),
            "num_indirect_value_bytes": 7 * sum("indirect_value" in value for value in values),
        }


def test_nodes_follow_one_another_with_the_root_last(tmp_path: Path, write_database: Write) -> None:
    entries, _, files = arrays(3000)
    nodes_file = write_database(tmp_path, entries.items(), files=files, max_node_bytes=2000)
    base = base_of(tmp_path)
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]

    ranges = []
    for nbytes, node, entry in walk(base, root):
        offset = int(entry["location"].split(":")[-2])
        ranges.append((offset, offset + nbytes, node["height"]))

    ranges.sort()
    assert ranges[0][0] == len(files["d/nodes"])
    assert [end for _, end, _ in ranges] == [
        *(start for start, _, _ in ranges[1:]),
        nodes_file.stat().st_size,
    ]
    assert [height for _, _, height in ranges] == sorted(height for _, _, height in ranges)
    assert root["location"].split(":")[-2] == str(ranges[-1][0])


@pytest.mark.parametrize("n_keys", [0, 1, 1000])
def test_tensorstore_would_encode_the_manifest_in_the_same_bytes(
    tmp_path: Path, write_database: Write, n_keys: int
) -> None:
    entries, _, files = arrays(n_keys)
    write_database(tmp_path, entries.items(), files=files, max_node_bytes=2000)

    manifest = ts.ocdbt.dump(base_of(tmp_path)).result()

    assert ts.ocdbt.undump_manifest(manifest) == (tmp_path / "manifest.ocdbt").read_bytes()
    assert manifest["config"] == {
        "uuid": UUID.hex(),
        "compression": None,
        "max_inline_value_bytes": MAX_INLINE_BYTES,
        "max_decoded_node_bytes": 2000,
        "version_tree_arity_log2": 4,
    }
    assert [version["generation_number"] for version in manifest["versions"]] == [1]
    assert manifest["versions"][0]["commit_time"] == 1_700_000_000_000_000_000


def test_tensorstore_writes_into_a_database_of_ours(tmp_path: Path, write_database: Write) -> None:
    entries, expected, files = arrays(300)
    write_database(tmp_path, entries.items(), files=files, max_node_bytes=1000)
    store = opened(tmp_path)

    store[b"params.layer_7.kernel/.zarray"] = b"new"
    store[b"zzz"] = b"x" * 3000

    expected |= {b"params.layer_7.kernel/.zarray": b"new", b"zzz": b"x" * 3000}
    again = opened(tmp_path)
    assert listed(again) == sorted(expected)
    assert read_all(again, list(expected)) == list(expected.values())


def test_an_empty_value_may_be_inline_or_in_a_data_file(tmp_path: Path, write_database: Write) -> None:
    entries = {b"a": Inline(b""), b"b": Indirect("d/nodes", 2, 0), b"c": Indirect("d/nodes", 2, 3)}
    write_database(tmp_path, entries.items(), files={"d/nodes": b"01234"})

    assert read_all(opened(tmp_path), [b"a", b"b", b"c"]) == [b"", b"", b"234"]


def test_offsets_beyond_four_gigabytes(tmp_path: Path, write_database: Write) -> None:
    sparse = tmp_path / "d" / "sparse"
    sparse.parent.mkdir()
    with sparse.open("wb") as file:
        file.truncate(2**40 + 5)
        file.seek(2**40)
        file.write(b"after")

    write_database(tmp_path, [(b"far", Indirect("d/sparse", 2**40, 5))])

    assert opened(tmp_path)[b"far"] == b"after"


# Few letters and long runs of them make for shared prefixes of all lengths, and keys that end in NUL.
shared = st.builds(
    lambda start, end: start + end,
    st.sampled_from([b"", b"a", b"a" * 127, b"a" * 128, b"a" * 300, b"a\0", b"\xff\xff"]),
    st.lists(st.sampled_from([b"a", b"b", b"\0", b"\xff", b"/"]), max_size=6).map(b"".join),
)
keys = st.one_of(shared, st.binary(max_size=12))
contents = st.one_of(st.binary(max_size=20), st.integers(0, 1024).map(lambda n: b"x" * n))


@pytest.mark.many_cases
@given(
    data=st.dictionaries(keys, st.tuples(st.booleans(), st.integers(0, 2), contents), max_size=60),
    max_node_bytes=st.sampled_from([1, 150, 600, 8 << 20]),
    order=st.randoms(use_true_random=False),
)
def test_tensorstore_reads_any_keys_and_values(
    write_database: Write, data: dict[bytes, tuple[bool, int, bytes]], max_node_bytes: int, order: Any
) -> None:
    files = {"d/a": b"", "d/ab": b"", "other/é %:~/d": b""}
    entries: list[tuple[bytes, Value]] = []
    for key, (inline, which, content) in data.items():
        name = list(files)[which]
        entries.append((key, Inline(content) if inline else Indirect(name, len(files[name]), len(content))))
        files[name] += b"" if inline else content
    order.shuffle(entries)

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_database(directory, entries, files=files, max_node_bytes=max_node_bytes)
        store = opened(directory)

        assert listed(store) == sorted(data)
        assert read_all(store, list(data)) == [content for _, _, content in data.values()]


def test_the_longest_keys_and_inline_values(tmp_path: Path, write_database: Write) -> None:
    entries = {bytes([i]) * MAX_KEY_BYTES: Inline(b"v" * MAX_INLINE_BYTES) for i in range(5)}
    write_database(tmp_path, entries.items(), max_node_bytes=100)

    assert read_all(opened(tmp_path), list(entries)) == [b"v" * MAX_INLINE_BYTES] * 5


INLINE = Inline(b"")


@pytest.mark.parametrize(
    "entries",
    [
        [(b"a", INLINE), (b"b", INLINE), (b"a", Indirect("d/x", 0, 1))],
        [(b"k" * (MAX_KEY_BYTES + 1), INLINE)],
        [(b"k", Inline(b"v" * (MAX_INLINE_BYTES + 1)))],
        [(b"k", Indirect("d/x", -1, 1))],
        [(b"k", Indirect("d/x", 1, -1))],
        [(b"k", Indirect("d/x", MAX_OFFSET, 1))],
        [(b"j", Indirect("d/x", 0, MAX_OFFSET)), (b"k", Indirect("d/y", 0, MAX_OFFSET))],
        [(b"k", Indirect("", 0, 1))],
        [(b"k", Indirect("/d/x", 0, 1))],
        [(b"k", Indirect("d/../../x", 0, 1))],
        [(b"k", Indirect("d//x", 0, 1))],
        [(b"k", Indirect("d/\0", 0, 1))],
        [(b"k", Indirect("d/\udc80", 0, 1))],
        [(b"k", Indirect("d" * 65536, 0, 1))],
    ],
)
def test_what_the_format_cannot_hold_is_refused(entries: list[tuple[bytes, Value]]) -> None:
    with pytest.raises(SpecError):
        encode(entries)


@pytest.mark.parametrize(
    "options",
    [
        {"uuid": b"short"},
        {"commit_time_ns": -1},
        {"commit_time_ns": 2**64},
        {"max_node_bytes": 0},
        {"max_node_bytes": 2**32},
        {"node_offset": -1},
        {"node_offset": MAX_OFFSET},
        {"node_file": "../nodes"},
        {"node_file": ""},
    ],
)
@pytest.mark.parametrize("entries", [[], [(b"a", INLINE)]])
def test_options_that_the_format_cannot_hold_are_refused(
    entries: list[tuple[bytes, Value]], options: dict[str, Any]
) -> None:
    with pytest.raises(SpecError):
        encode(entries, **options)


def test_a_duplicate_key_is_named() -> None:
    with pytest.raises(SpecError, match="twin"):
        encode([(b"twin", INLINE), (b"other", INLINE), (b"twin", INLINE)])


def test_the_order_of_the_entries_does_not_matter() -> None:
    entries, _, _ = arrays(20_000)

    assert encode(list(entries.items())) == encode(list(reversed(entries.items())))
    assert encode(list(entries.items())) == encode(sorted(entries.items(), key=lambda entry: hash(entry[0])))
