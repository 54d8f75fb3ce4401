"""What is not a finished checkpoint, in every way we could think of, and the error that says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import tensorstore as ts

from penstock.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    TruncatedDataError,
    UnsupportedFormatError,
)
from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.formats.orbax.tree_documents import check_files
from penstock.handlers.formats.orbax.tree_metadata import (
    decode_shardings,
    decode_strings,
    encode_strings,
    find_string,
)

SHARDING = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'
DOCUMENTS = [
    "_METADATA",
    "_sharding",
    "array_metadatas/process_0",
    "_strings.json",
    "_CHECKPOINT_METADATA",
    "_PENSTOCK_INTEGRITY",
]


@pytest.fixture
def path(tmp_path: Path, make_leaf: Any, write_flat: Any) -> Path:
    values = np.arange(300, dtype=np.float32)
    leaves = [
        make_leaf(0, ("a", 0), "jax.Array", like=values, sharding=SHARDING, extended_dtype="rbg"),
        make_leaf(1, ("b",), "string", text="x"),
        make_leaf(2, ("c",), "mine.Type"),
    ]
    write_flat(tmp_path / "ckpt", leaves, {0: values})
    return tmp_path / "ckpt"


def open_(path: Path) -> OrbaxCheckpoint:
    return OrbaxLayout().open(LocalStore(), str(path))


def data_file(path: Path) -> Path:
    name: str
    (name,) = msgpack.unpackb((path / "_PENSTOCK_INTEGRITY").read_bytes())["files"]
    return path / name


def test_an_undamaged_checkpoint_opens(path: Path) -> None:
    found = open_(path)

    assert [leaf.spec.typestr for leaf in found.leaves] == ["jax.Array", "string", "mine.Type"]
    assert found.leaves[0].spec.extended_dtype == "rbg"
    assert found.leaves[2].spec.shape is None
    name = str(data_file(path).relative_to(path))
    assert [(piece.offset, piece.nbytes) for piece in found.expected_crc32c(name)] == [(0, 1000), (1000, 200)]
    assert found.expected_crc32c("d/other") == ()
    assert found.has_checksums


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("data", [b"{", b"\xff\xfe\x00", b"null", b"[]", b"3", b"\xc1"], ids=repr)
def test_a_document_that_is_something_else_names_its_file(name: str, data: bytes, path: Path) -> None:
    (path / name).write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match=f"/{name}: "):
        open_(path)


@pytest.mark.parametrize("name", [*DOCUMENTS, "manifest.ocdbt"])
def test_a_document_cut_short_anywhere_names_its_file(name: str, path: Path) -> None:
    whole = (path / name).read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        if not length and name == "_CHECKPOINT_METADATA":
            continue  # Orbax allows it to be empty

        (path / name).write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError, match=f"/{name}: "):
            open_(path)


def test_an_empty_checkpoint_metadata_says_nothing(path: Path) -> None:
    (path / "_CHECKPOINT_METADATA").write_bytes(b"")

    assert open_(path).committed_at_ns is None


WRONG: list[Any] = [None, True, 3, -1, "x", [], [3], ["x"], {}, {"x": 3}, {"x": {}}]


def every_wrong_version(document: Any) -> list[Any]:
    """Replace each part of a document, at any depth, by each thing of another type."""
    made = [wrong for wrong in WRONG if type(wrong) is not type(document)]
    if isinstance(document, dict):
        for key, value in document.items():
            made += [document | {key: wrong} for wrong in every_wrong_version(value)]
            made.append({name: kept for name, kept in document.items() if name != key})
    elif isinstance(document, list):
        for i, value in enumerate(document):
            made += [[*document[:i], wrong, *document[i + 1 :]] for wrong in every_wrong_version(value)]

    return made


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_with_any_part_of_another_type_opens_or_names_its_file(name: str, path: Path) -> None:
    packed = name == "_PENSTOCK_INTEGRITY"
    load: Callable[[bytes], Any] = msgpack.unpackb if packed else json.loads
    refused = unnamed = 0
    for wrong in every_wrong_version(load((path / name).read_bytes())):
        (path / name).write_bytes(msgpack.packb(wrong) if packed else json.dumps(wrong).encode())
        try:
            open_(path)
        except CorruptCheckpointError as error:
            refused += 1
            unnamed += name not in str(error) and error.key_path is None

    assert unnamed == 0
    assert refused > 10


@pytest.mark.parametrize(
    ("name", "error", "problem"),
    [
        ("_METADATA", CorruptCheckpointError, "/_METADATA: is missing"),
        ("manifest.ocdbt", CorruptCheckpointError, "manifest.ocdbt: is missing, and there are arrays"),
        (
            "_strings.json",
            CorruptCheckpointError,
            r"_strings.json: the string 'b' is missing \(leaf \['b'\]\)",
        ),
    ],
)
def test_a_document_that_must_be_there_and_is_not(
    name: str, error: type[Exception], problem: str, path: Path
) -> None:
    (path / name).unlink()

    with pytest.raises(error, match=problem):
        open_(path)


@pytest.mark.parametrize(
    "name", ["_sharding", "array_metadatas/process_0", "_CHECKPOINT_METADATA", "_PENSTOCK_INTEGRITY"]
)
def test_a_document_that_may_be_absent(name: str, path: Path) -> None:
    (path / name).unlink()

    assert len(open_(path).leaves) == 3


def test_a_leaf_that_the_index_lacks_is_named(path: Path) -> None:
    document = json.loads((path / "_METADATA").read_bytes())
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    keys = [{"key": "opt", "key_type": 2}, {"key": "0", "key_type": 1}]
    document["tree_metadata"]["extra"] = {"key_metadata": keys, "value_metadata": value}
    (path / "_METADATA").write_text(json.dumps(document))

    with pytest.raises(
        CorruptCheckpointError, match=r"'opt.0' is listed .* \(leaf \['opt'\]\[0\]\)"
    ) as caught:
        open_(path)
    assert caught.value.key_path == "['opt'][0]"


def test_a_leaf_kept_in_the_legacy_file_is_named(path: Path) -> None:
    text = (path / "_METADATA").read_text()
    (path / "_METADATA").write_text(text.replace('"skip_deserialize": false', '"skip_deserialize": true', 1))

    with pytest.raises(CorruptCheckpointError, match=r"/checkpoint: is missing.*\(leaf \['a'\]\[0\]\)"):
        open_(path)


def test_an_entry_above_another_is_left_out(path: Path) -> None:
    document = json.loads((path / "_METADATA").read_bytes())
    value = {"value_type": "None", "skip_deserialize": True}
    document["tree_metadata"]["('a',)"] = {
        "key_metadata": [{"key": "a", "key_type": 2}],
        "value_metadata": value,
    }
    (path / "_METADATA").write_text(json.dumps(document))

    assert [leaf.info.name for leaf in open_(path).leaves] == ["a.0", "b", "c"]


def test_a_path_listed_twice_is_corrupt(path: Path) -> None:
    document = json.loads((path / "_METADATA").read_bytes())
    document["tree_metadata"]["again"] = document["tree_metadata"]["('b',)"]
    (path / "_METADATA").write_text(json.dumps(document))

    with pytest.raises(CorruptCheckpointError, match=r"_METADATA: \('b',\) is listed twice"):
        open_(path)


def test_a_data_file_cut_short_is_found_when_opening(path: Path) -> None:
    file = data_file(path)
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(TruncatedDataError, match="ends at byte 1199, but 1200 are needed") as caught:
        open_(path)
    assert (caught.value.path, caught.value.needed, caught.value.found) == (str(file), 1200, 1199)


def test_the_longest_reach_into_a_data_file_counts(make_leaf: Any, write_flat: Any, tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.int32)
    leaves = [make_leaf(0, ("z",), like=values), make_leaf(1, ("a",), like=values)]
    write_flat(tmp_path, leaves, {0: values, 1: values})
    file = data_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(TruncatedDataError, match="ends at byte 63, but 64 are needed"):
        open_(tmp_path)


def test_an_index_that_leads_out_of_the_checkpoint_is_refused(path: Path) -> None:
    (path.parent / "secret").write_bytes(bytes(100))

    with pytest.raises(CorruptCheckpointError, match=r"'\.\./secret' leads out of the checkpoint"):
        check_files(LocalStore(), str(path), {"../secret": 100})


def test_a_data_file_that_is_gone_is_found_when_opening(path: Path) -> None:
    file = data_file(path)
    file.unlink()

    with pytest.raises(CorruptCheckpointError, match=f"{file}: is missing, and the index refers to it"):
        open_(path)


@pytest.mark.parametrize("name", ["..", "../ckpt", "x/../../y"])
def test_a_name_that_leads_out_of_the_checkpoint_is_refused(name: str, path: Path) -> None:
    document = json.loads((path / "_METADATA").read_bytes())
    document["use_ocdbt"] = False
    document["tree_metadata"]["('a', '0')"]["key_metadata"] = [{"key": name, "key_type": 2}]
    (path / "_METADATA").write_text(json.dumps(document))

    with pytest.raises(CorruptCheckpointError, match="leads out of the checkpoint"):
        open_(path)


def test_checksums_of_a_later_version_are_not_guessed_at(path: Path) -> None:
    (path / "_PENSTOCK_INTEGRITY").write_bytes(msgpack.packb({"version": 3}))

    with pytest.raises(UnsupportedFormatError, match="is of version 3; this penstock reads 2"):
        open_(path)


@pytest.mark.parametrize("suffix", ["", "-1700000000000000", "-3"])
def test_a_temporary_name_is_an_interrupted_save(suffix: str, path: Path) -> None:
    temporary = path.rename(path.with_name(f"ckpt.orbax-checkpoint-tmp{suffix}"))

    with pytest.raises(IncompleteCheckpointError, match="its name says so"):
        open_(temporary)
    with pytest.raises(IncompleteCheckpointError, match=f"there is only '{temporary.name}'"):
        open_(path)


@pytest.mark.parametrize(
    ("files", "error", "problem"),
    [
        ((), NotACheckpointError, "is no checkpoint: it holds neither"),
        (("notes.txt",), NotACheckpointError, "is no checkpoint"),
        (
            ("9/default/_METADATA", "10/default/_METADATA"),
            CorruptCheckpointError,
            "10/default/_METADATA: is empty",
        ),
        (("7/_METADATA",), CorruptCheckpointError, "7/_METADATA: is empty"),
        (("s_1/_CHECKPOINT_METADATA",), UnsupportedFormatError, "s_1: is an Orbax checkpoint without a tree"),
        (
            ("a/_METADATA", "b/_METADATA"),
            UnsupportedFormatError,
            r"2 trees \(a, b\); name one, as in item='a'",
        ),
        (("default.orbax-checkpoint-tmp/_METADATA",), IncompleteCheckpointError, "is only 'default.orbax"),
        (("checkpoint", "w/.zarray"), CorruptCheckpointError, "/checkpoint: ends at byte 0"),
        (("model.safetensors",), UnsupportedFormatError, "safetensors"),
        (("orbax.checkpoint", "cfg/data.json"), CorruptCheckpointError, "cfg/data.json: is empty"),
        (("orbax.checkpoint", "cfg/other"), UnsupportedFormatError, "without a tree"),
        (("_CHECKPOINT_METADATA", "w/.zarray"), UnsupportedFormatError, "without a tree"),
        (("state/d/x", "state/_sharding"), CorruptCheckpointError, "state/_METADATA: is missing"),
    ],
)
def test_a_directory_that_is_something_else_is_recognised(
    files: tuple[str, ...], error: type[Exception], problem: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).touch()
    (tmp_path / "x").mkdir(exist_ok=True)

    with pytest.raises(error, match=problem):
        open_(tmp_path / "x")


def test_no_directory_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(NotACheckpointError, match="does not exist"):
        open_(tmp_path / "absent")
    with pytest.raises(NotACheckpointError, match="does not exist"):
        open_(tmp_path / "no" / "parent")
    with pytest.raises(NotACheckpointError, match="is a file"):
        open_(tmp_path / "file")
    with pytest.raises(UnsupportedFormatError, match="safetensors"):
        open_(tmp_path / "model.safetensors")


def test_a_sharding_key_that_is_not_base64_is_named() -> None:
    with pytest.raises(CorruptCheckpointError, match="where: the key 'w' is not base64"):
        decode_shardings("where", b'{"w": "{}"}')


@pytest.mark.parametrize("name", ["", "a", "a/b", "a//b", "/", "a~0b", "t~1", "l/0"])
def test_strings_go_to_their_pointers_and_back(name: str, make_leaf: Any) -> None:
    document = encode_strings([(make_leaf(0, (name,), "string").info, "value")])

    assert find_string("where", decode_strings("where", document), name, "") == "value"
    spec = {"driver": "json", "kvstore": "memory://x.json", "json_pointer": f"/{name}"}
    context = ts.Context()
    ts.KvStore.open("memory://", context=context).result().write("x.json", document).result()
    assert ts.open(spec, context=context).result().read().result().item() == "value"
