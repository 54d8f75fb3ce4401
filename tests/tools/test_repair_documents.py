"""Documents without which nobody knew what was stored: they are made again as far as that can be done."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import pytest
import tensorstore as ts
from tests.unsealed import unseal

import penstock
from penstock import RepairReport
from penstock.errors import CorruptCheckpointError
from penstock.handlers import LocalStore
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.handlers.ocdbt.database_writer import encode_index
from penstock.handlers.ocdbt.wire_format import Indirect, Inline

AssertSame = Callable[[Any, Any], None]
TREE: Any = {
    "a": np.arange(300.0),
    "b": [np.arange(50), np.float32(2)],
    "jax": jax.numpy.arange(7),
    "key": jax.random.key(3),
    "text": "t",
    "slash/es": "u",
}
FORMS = {
    "ocdbt": penstock.SaveFormat(),
    "zstd": penstock.SaveFormat(codec="zstd"),
    "directories": penstock.SaveFormat(ocdbt=False),
    "zarr3": penstock.SaveFormat(zarr=3),
}


def save(path: Path, tree: Any = TREE, form: penstock.SaveFormat | None = None) -> Path:
    with penstock.sync.Checkpointer(save_format=form) as checkpointer:
        checkpointer.save(path, tree).result()

    return path


def repaired(source: Path) -> RepairReport:
    return penstock.sync.repair(source, source.with_name("new"))


def outcomes(report: RepairReport) -> dict[str, str]:
    return {leaf.name: leaf.outcome for leaf in report.leaves if leaf.key_path}


def flip(file: Path, at: int = -5) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def node_file(path: Path) -> Path:
    (found,) = [file for file in (path / "d").iterdir() if file.read_bytes()[:4].hex() == "0cdb20de"]
    return found


def without_record(path: Path) -> Path:
    """Leave no checksums, as Orbax does."""
    unseal(path)
    (path / "_PENSTOCK_INTEGRITY").unlink()
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
def test_without_the_structure_every_array_is_found_by_its_name(
    tmp_path: Path, form: str, sealed: bool, assert_same: AssertSame
) -> None:
    source = save(tmp_path / "c", form=FORMS[form])
    if not sealed:
        without_record(source)
    (source / "_METADATA").write_bytes(b"{}")

    report = repaired(source)

    assert [leaf.name for leaf in report.gone] == ["(all of it)"]
    assert report.gone[0].problem.startswith("_METADATA: ")
    assert len(outcomes(report)) == len(jax.tree.leaves(TREE))
    assert_same(penstock.sync.restore(tmp_path / "new", like=TREE), TREE)
    found = penstock.sync.restore(tmp_path / "new")
    assert sorted(found["b"]) == ["0", "1"]
    assert isinstance(found["jax"], jax.Array)


def test_names_that_lie_in_each_other_are_not_split(tmp_path: Path) -> None:
    source = save(tmp_path / "c", {"a.b": np.arange(3), "a.b.c": np.arange(4), "d.e": np.arange(5)})
    (source / "_METADATA").unlink()

    repaired(source)

    found = penstock.sync.restore(tmp_path / "new")
    assert {name: len(value) for name, value in found.items()} == {"a.b": 3, "a.b.c": 4, "d.e": 5}


@pytest.mark.parametrize("damage", ["lost", "flipped"])
@pytest.mark.parametrize("form", ["ocdbt", "zstd", "zarr3"])
def test_a_lost_manifest_is_found_again_by_its_nodes(
    tmp_path: Path, form: str, damage: str, assert_same: AssertSame
) -> None:
    source = save(tmp_path / "c", form=FORMS[form])
    manifest = source / "manifest.ocdbt"
    if damage == "lost":
        manifest.unlink()
    else:
        flip(manifest)

    report = repaired(source)

    assert report.complete
    assert [leaf.problem[:10] for leaf in report.rebuilt] == ["the index:"]
    assert_same(penstock.sync.restore(tmp_path / "new"), penstock.sync.restore(save(tmp_path / "other")))
    assert penstock.sync.verify(tmp_path / "new").intact


def test_a_missing_manifest_and_metadata_are_made_again(tmp_path: Path, assert_same: AssertSame) -> None:
    source = save(tmp_path / "c")
    (source / "manifest.ocdbt").unlink()
    (source / "_METADATA").unlink()

    report = repaired(source)

    assert [leaf.problem.partition(":")[0] for leaf in report.gone] == ["_METADATA"]
    assert_same(penstock.sync.restore(tmp_path / "new", like=TREE), TREE)


def with_small_nodes(path: Path, max_node_bytes: int = 400) -> Path:
    """Write the index again in many nodes; nothing has a digest then."""
    without_record(path)
    entries = dict(read_index(LocalStore(), str(path)))
    node_file(path).unlink()
    index = encode_index(
        entries.items(),
        node_file="d/nodes",
        node_offset=0,
        uuid=bytes(16),
        commit_time_ns=0,
        max_node_bytes=max_node_bytes,
    )
    (path / "d" / "nodes").write_bytes(index.nodes)
    (path / "manifest.ocdbt").write_bytes(index.manifest)
    return path


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_damaged_node_takes_only_the_leaves_in_it(tmp_path: Path, with_manifest: bool) -> None:
    tree = {f"layer{at:02}": np.full(30, at) for at in range(40)}
    source = with_small_nodes(save(tmp_path / "c", tree))
    nodes = source / "d" / "nodes"
    assert nodes.read_bytes().count(bytes.fromhex("0cdb20de")) > 20
    flip(nodes, len(nodes.read_bytes()) // 3)
    if not with_manifest:
        (source / "manifest.ocdbt").unlink()

    report = repaired(source)

    gone = [leaf.key_path for leaf in report.gone if leaf.key_path]
    assert 1 <= len(gone) <= 4
    assert any(leaf.problem.startswith("part of the index: ") for leaf in report.gone)
    found = penstock.sync.restore(tmp_path / "new")
    assert len(found) == len(tree) - len(gone)
    for name, value in found.items():
        np.testing.assert_array_equal(value, tree[name])


def test_without_its_root_an_index_is_not_guessed(tmp_path: Path) -> None:
    source = with_small_nodes(save(tmp_path / "c", {f"x{at}": np.arange(9) for at in range(20)}))
    (source / "manifest.ocdbt").unlink()
    flip(source / "d" / "nodes")  # the root is the last node

    with pytest.raises(CorruptCheckpointError, match="is missing, and there are arrays"):
        repaired(source)


@pytest.mark.parametrize("lost", ["_METADATA", "manifest.ocdbt", "d"])
def test_other_items_are_saved_whatever_one_has_lost(tmp_path: Path, lost: str) -> None:
    items = penstock.Composite(state={"a": np.arange(9)}, other={"b": np.arange(5)})
    source = save(tmp_path / "c", items)
    if lost == "d":
        shutil.rmtree(source / "state" / lost)
    else:
        (source / "state" / lost).unlink()

    report = repaired(source)

    assert penstock.sync.verify(tmp_path / "new").intact
    found = penstock.sync.restore_items(tmp_path / "new")
    np.testing.assert_array_equal(found["other"]["b"], np.arange(5))
    assert ("state" in found) == (lost != "d")
    assert {leaf.item for leaf in report.gone} == (set() if lost == "manifest.ocdbt" else {"state"})


def test_a_leaf_that_cannot_be_decoded_is_gone_and_the_others_are_saved(tmp_path: Path) -> None:
    """Nothing has a checksum, so only decoding shows it."""
    tree = {name: np.arange(20_000.0) for name in "abc"}
    source = without_record(save(tmp_path / "c", tree, FORMS["zstd"]))
    spoil_frame(source, b"b/0")

    report = repaired(source)

    assert outcomes(report) == {"['a']": "unchecked", "['b']": "gone", "['c']": "unchecked"}
    assert sorted(penstock.sync.restore(tmp_path / "new")) == ["a", "c"]


def test_an_array_whose_file_ends_early_is_gone(tmp_path: Path) -> None:
    source = without_record(save(tmp_path / "c", form=FORMS["directories"]))
    (source / "a" / "0").write_bytes(b"short")

    assert {name for name, outcome in outcomes(repaired(source)).items() if outcome == "gone"} == {"['a']"}


def spoil_frame(path: Path, key: bytes) -> None:
    """Let a chunk begin in no way that zstd begins."""
    where = read_index(LocalStore(), str(path))[key]
    assert isinstance(where, Indirect)
    with (path / where.file).open("r+b") as file:
        file.seek(where.offset)
        file.write(b"no zstd!")


def test_bytes_that_were_wrong_when_they_were_sealed(tmp_path: Path) -> None:
    tree = {"a": np.arange(20_000.0), "b": np.arange(3)}
    source = without_record(save(tmp_path / "c", tree, FORMS["zstd"]))
    spoil_frame(source, b"a/0")
    penstock.sync.seal(source)

    report = repaired(source)

    assert outcomes(report) == {"['a']": "gone", "['b']": "kept"}


def test_many_lost_arrays_are_left_out_at_once(tmp_path: Path) -> None:
    source = save(tmp_path / "c", {f"x{at}": np.arange(3) for at in range(60)}, FORMS["directories"])
    for at in range(0, 60, 2):
        shutil.rmtree(source / f"x{at}")

    report = repaired(source)

    assert len(report.gone) == 30
    assert len(penstock.sync.restore(tmp_path / "new")) == 30


def test_what_tensorstore_wrote_is_not_guessed_at(tmp_path: Path) -> None:
    """Its files hold values and nodes of several versions."""
    source = save(tmp_path / "c", {"a": np.arange(3)})
    without_record(source)
    entries = dict(read_index(LocalStore(), str(source)))
    shutil.rmtree(source / "d")
    (source / "manifest.ocdbt").unlink()
    base = {"driver": "ocdbt", "base": f"file://{source}/", "config": {"compression": None}}
    for key, value in entries.items():
        store = ts.KvStore.open(base).result()
        store[key] = value.value if isinstance(value, Inline) else np.arange(3).tobytes()
    (source / "manifest.ocdbt").unlink()

    with pytest.raises(CorruptCheckpointError):
        repaired(source)


def test_a_document_in_which_a_leaf_is_listed_is_changed_for_no_other(tmp_path: Path) -> None:
    """An old checkpoint with values in msgpack has no `_METADATA` to leave a leaf out of."""
    source = tmp_path / "c"
    source.mkdir()
    array = msgpack.ExtType(1, msgpack.packb([[2], "float32", b"short"]))
    (source / "checkpoint").write_bytes(msgpack.packb({"a": array}))

    with pytest.raises(CorruptCheckpointError):
        repaired(source)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
