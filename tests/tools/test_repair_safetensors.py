"""Damaged safetensors, one file and several, and what is left of them in new ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import penstock
from penstock import RepairReport
from penstock.cli import main
from penstock.errors import (
    CorruptCheckpointError,
    LinkOutsideError,
    PathError,
    SpecError,
    UnsupportedFormatError,
)
from penstock.handlers import LocalStore
from penstock.handlers.formats.safetensors.tensor_survey import survey_tensors
from penstock.testing import FaultyStore

AssertSame = Callable[[Any, Any], None]
INDEX = "model.safetensors.index.json"


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tree(step: int = 0) -> Any:
    """Of which only `b.0` changes from step to step."""
    return {
        "a": noise(30, 10),
        "b": [noise(50, seed=step), noise(7), np.zeros(0, np.int8)],
        "key": jax.random.key(3),
        "n": np.int32(3),
        "text": "t",
        "none": None,
    }


def export(path: Path, value: Any, **options: Any) -> Path:
    penstock.sync.export_safetensors(value, path, custom_metadata={"who": "me", "n": 3}, **options)
    return path


def one(folder: Path, name: str, value: Any) -> Path:
    return export(folder / f"{name}.safetensors", value)


def several(folder: Path, name: str, value: Any) -> Path:
    path = export(folder / name, value, max_shard_bytes=200)
    assert len(list(path.iterdir())) > 3
    return path


KINDS: Any = {"one file": one, "several": several}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def place(path: Path, name: str) -> tuple[Path, int]:
    """Return the file of a tensor, and where it begins."""
    ranges = survey_tensors(LocalStore(), str(path)).ranges
    found = next(found for found in ranges if found.key_paths == (f"['{name}']",))
    return Path(found.file), found.checksum.offset


def spoil(path: Path, name: str) -> Path:
    """Flip one bit of a tensor. Return its file."""
    file, offset = place(path, name)
    flip(file, offset)
    return file


def outcomes(report: RepairReport) -> dict[str, str]:
    """What became of the tensors that are not as they were, and of whole files."""
    return {leaf.name: leaf.outcome for leaf in report.leaves if leaf.outcome != "kept"}


def restored(path: Path) -> Any:
    return penstock.sync.restore(path, split=".")


@pytest.mark.parametrize("save", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("target", ["new", "new.safetensors"])
def test_every_intact_tensor_is_kept_and_the_damaged_one_is_named(
    tmp_path: Path, save: Any, target: str, assert_same: AssertSame
) -> None:
    source = save(tmp_path, "c", tree())
    spoil(source, "b.1")

    report = penstock.sync.repair(source, tmp_path / target)

    assert outcomes(report) == {"['b.1']": "gone"}
    assert report.gone[0].problem == "the bytes are not those that were written"
    assert not report.complete
    assert penstock.sync.verify(tmp_path / target).intact
    like = tree()
    like["b"][1] = np.zeros(7, np.float32)
    assert_same(penstock.sync.restore(tmp_path / target, like=like, on_missing="keep"), like)
    found = restored(tmp_path / target)
    assert found["text"] == "t"
    assert found["none"] is None
    assert penstock.sync.metadata(tmp_path / target).custom_metadata == {"who": "me", "n": 3}
    assert (
        "b.1" in load_file(next((tmp_path / target).glob("model.safetensors"), tmp_path / target))
    ) is False


@pytest.mark.parametrize("save", KINDS.values(), ids=KINDS)
def test_a_tensor_is_taken_from_another_checkpoint_where_it_is_the_same(
    tmp_path: Path, save: Any, assert_same: AssertSame
) -> None:
    steps = [save(tmp_path, str(step), tree(step)) for step in range(3)]
    spoil(steps[1], "a")
    spoil(steps[0], "a")
    spoil(steps[1], "b.0")
    orbax = tmp_path / "orbax"
    penstock.sync.save(orbax, tree(1))

    report = penstock.sync.repair(steps[1], tmp_path / "new", others=[orbax, steps[0], steps[2]])

    assert outcomes(report) == {"['a']": "taken", "['b.0']": "gone"}
    assert [leaf.taken_from for leaf in report.taken] == [str(steps[2])]
    like = tree()
    like["b"][0] = np.zeros(50, np.float32)
    assert_same(penstock.sync.restore(tmp_path / "new", like=like, on_missing="keep"), like)


def test_a_tensor_of_the_same_bytes_and_another_type_is_not_taken(tmp_path: Path) -> None:
    source = one(tmp_path, "c", {"a": np.arange(6, dtype=np.int32), "b": np.arange(3)})
    other = one(tmp_path, "other", {"a": np.arange(6, dtype=np.uint32), "b": np.arange(3)})
    spoil(source, "a")

    assert outcomes(penstock.sync.repair(source, tmp_path / "new", others=[other])) == {"['a']": "gone"}


@pytest.mark.parametrize("with_index", [True, False])
def test_a_lost_file_takes_only_what_was_in_it(tmp_path: Path, with_index: bool) -> None:
    source = several(tmp_path, "c", tree())
    lost = place(source, "b.0")[0]
    lost.unlink()
    if not with_index:
        (source / INDEX).unlink()

    report = penstock.sync.repair(source, tmp_path / "new")

    assert outcomes(report) == {"(all of it)": "gone"} | ({"['b.0']": "gone"} if with_index else {})
    assert report.gone[0].problem.startswith(f"{lost.name}: is missing")
    assert restored(tmp_path / "new")["a"].tobytes() == tree()["a"].tobytes()
    assert "0" not in restored(tmp_path / "new")["b"]


def test_without_the_file_that_has_the_note_tensors_are_kept_by_their_names(tmp_path: Path) -> None:
    source = several(tmp_path, "c", tree())
    next(source.glob("*-00001-of-*")).unlink()

    report = penstock.sync.repair(source, tmp_path / "new")

    assert {leaf.key_path for leaf in report.gone} == {"", "['a']"}
    found = restored(tmp_path / "new")
    assert found["b"]["0"].tobytes() == tree()["b"][0].tobytes()
    assert "text" not in found


@pytest.mark.parametrize("damage", ["flipped", "cut", "no index"])
def test_a_damaged_index_is_done_without(tmp_path: Path, damage: str, assert_same: AssertSame) -> None:
    source = several(tmp_path, "c", tree())
    index = source / INDEX
    if damage == "flipped":
        flip(index, index.read_bytes().index(b"model-0"))
    else:
        index.write_bytes(index.read_bytes()[:50] if damage == "cut" else b'{"weight_map": 3}')

    report = penstock.sync.repair(source, tmp_path / "new")

    assert outcomes(report) == {"(all of it)": "gone"}
    assert report.gone[0].problem.startswith(f"{INDEX}: ")
    assert_same(
        restored(tmp_path / "new"), penstock.sync.restore(several(tmp_path, "whole", tree()), split=".")
    )


@pytest.mark.parametrize("save", KINDS.values(), ids=KINDS)
def test_a_damaged_header_that_still_describes_its_file_is_read_and_said(tmp_path: Path, save: Any) -> None:
    source = save(tmp_path, "c", tree())
    file = place(source, "b.1")[0]
    flip(file, file.read_bytes().index(b'b.1":{"dtype'))
    index = source / INDEX

    report = penstock.sync.repair(source, tmp_path / "new")

    assert "['c.1']" in [leaf.key_path for leaf in report.unchecked]
    assert "differs from what was written" in report.unchecked[0].problem
    assert [leaf.key_path for leaf in report.gone] == (["['b.1']"] if index.exists() else [])
    assert restored(tmp_path / "new")["a"].tobytes() == tree()["a"].tobytes()
    assert penstock.sync.verify(tmp_path / "new").intact


@pytest.mark.parametrize("what", [b'"shape":[30,', b'{"__meta', "length"])
def test_a_header_that_cannot_be_read_takes_its_file(tmp_path: Path, what: bytes | str) -> None:
    source = several(tmp_path, "c", tree())
    file = place(source, "a")[0]
    flip(file, 7 if isinstance(what, str) else file.read_bytes().index(what) + len(what) - 2)

    report = penstock.sync.repair(source, tmp_path / "new")

    assert {leaf.key_path for leaf in report.gone} == {"", "['a']"}
    assert not report.unchecked
    assert restored(tmp_path / "new")["b"]["0"].tobytes() == tree()["b"][0].tobytes()


def test_a_damaged_header_that_leaves_bytes_over_takes_its_file(tmp_path: Path) -> None:
    source = export(tmp_path / "c.safetensors", {"a": noise(7), "b": noise(3)})
    whole = source.read_bytes()
    assert b'[3],"data_offsets":[28,40]' in whole
    source.write_bytes(whole.replace(b'[3],"data_offsets":[28,40]', b'[2],"data_offsets":[28,36]'))

    with pytest.raises(CorruptCheckpointError, match="differs from what was written"):
        penstock.sync.repair(source, tmp_path / "new")


@pytest.mark.parametrize("sealed", [True, False])
def test_a_file_that_was_cut_short_keeps_what_lies_before_the_cut(tmp_path: Path, sealed: bool) -> None:
    source = tmp_path / "c.safetensors"
    values = {"a": noise(50), "b": noise(7), "c": noise(20)}
    if sealed:
        export(source, values)
    else:
        save_file(values, source)
    source.write_bytes(source.read_bytes()[:-100])  # all of `c`, and a part of `b`

    report = penstock.sync.repair(source, tmp_path / "new")

    assert {leaf.key_path for leaf in report.gone} == {"['b']", "['c']"}
    assert {leaf.key_path for leaf in report.unchecked} == (set() if sealed else {"['a']"})
    assert restored(tmp_path / "new")["a"].tobytes() == values["a"].tobytes()


def test_what_has_no_checksum_is_kept_and_said(tmp_path: Path) -> None:
    values = {"a": noise(5), "a.b": noise(7)}  # which are no tree
    save_file(values, tmp_path / "c.safetensors", {"format": "pt"})

    report = penstock.sync.repair(tmp_path / "c.safetensors", tmp_path / "new.safetensors")

    assert outcomes(report) == {"['a']": "unchecked", "['a.b']": "unchecked"}
    found = load_file(tmp_path / "new.safetensors")
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in values.items()
    }
    assert penstock.sync.metadata(tmp_path / "new.safetensors").custom_metadata == {"format": "pt"}


def test_a_note_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    values = {"a": noise(5)}
    save_file(values, tmp_path / "c.safetensors", {"penstock": "{", "who": "me"})

    report = penstock.sync.repair(tmp_path / "c.safetensors", tmp_path / "new")

    assert [leaf.key_path for leaf in report.gone] == [""]
    assert "strings, None, containers" in report.gone[0].problem
    assert restored(tmp_path / "new")["a"].tobytes() == values["a"].tobytes()
    assert penstock.sync.metadata(tmp_path / "new").custom_metadata == {"who": "me"}


def test_whatever_bit_is_flipped_what_is_called_kept_is_what_was_written(tmp_path: Path) -> None:
    values = {"a": noise(60), "b": {"c": np.arange(200, dtype=np.int8)}, "s": "text"}
    whole = one(tmp_path, "whole", values)
    written = penstock.sync.restore(whole)
    source, target = tmp_path / "c.safetensors", tmp_path / "new.safetensors"
    n_kept = n_refused = 0
    for at in range(0, whole.stat().st_size, 31):
        shutil.copy(whole, source)
        flip(source, at)
        try:
            report = penstock.sync.repair(source, target, overwrite=True)
        except CorruptCheckpointError:
            n_refused += 1
            continue

        assert not report.complete, at
        found = penstock.sync.restore(target)
        for leaf in report.leaves:
            if leaf.outcome == "kept":
                name = leaf.key_path[2:-2]
                assert np.array_equal(found[name], written[name]), at
                n_kept += 1

    assert n_kept > 10
    assert n_refused > 3


class TestRefusals:
    def test_a_target_that_is_the_source_or_lies_in_it(self, tmp_path: Path) -> None:
        source = several(tmp_path, "c", tree())
        for target in (source, source / "inside"):
            with pytest.raises(PathError):
                penstock.sync.repair(source, target, overwrite=True)

    def test_a_save_format_of_another_layout_is_refused(self, tmp_path: Path) -> None:
        source = one(tmp_path, "c", tree())
        with pytest.raises(SpecError, match="save_format is for Orbax's layout"):
            penstock.sync.repair(source, tmp_path / "new", save_format=penstock.SaveFormat())

    def test_a_checkpoint_of_orbaxs_layout_under_the_name_of_such_a_file(self, tmp_path: Path) -> None:
        penstock.sync.save(tmp_path / "c", tree())
        with pytest.raises(PathError, match="is the name of a safetensors file"):
            penstock.sync.repair(tmp_path / "c", tmp_path / "new.safetensors")

    def test_a_tensor_in_two_files(self, tmp_path: Path) -> None:
        source = several(tmp_path, "c", tree())
        (source / INDEX).unlink()
        shutil.copy(place(source, "a")[0], source / "more.safetensors")
        with pytest.raises(CorruptCheckpointError, match="also holds"):
            penstock.sync.repair(source, tmp_path / "new")

    def test_a_type_that_is_not_read(self, tmp_path: Path) -> None:
        header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
        (tmp_path / "c.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
        with pytest.raises(UnsupportedFormatError, match="F4"):
            penstock.sync.repair(tmp_path / "c.safetensors", tmp_path / "new")

    def test_a_link_that_leads_out(self, tmp_path: Path) -> None:
        source = several(tmp_path, "c", tree())
        file = place(source, "a")[0]
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
        with pytest.raises(LinkOutsideError):
            penstock.sync.repair(source, tmp_path / "new")

    def test_a_checkpoint_without_an_intact_tensor_is_refused(self, tmp_path: Path) -> None:
        source = one(tmp_path, "c", {"a": noise(3)})
        spoil(source, "a")
        with pytest.raises(
            CorruptCheckpointError, match="nothing that can be saved: the bytes are not those"
        ):
            penstock.sync.repair(source, tmp_path / "new")

        assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


@pytest.mark.parametrize(
    "operation", ["open_data_file", "file.read_at", "data.write_at", "data.sync", "publish"]
)
async def test_cancelled_midway_leaves_nothing(tmp_path: Path, operation: str) -> None:
    await penstock.export_safetensors(tree(), tmp_path / "c.safetensors")
    store = FaultyStore(LocalStore())
    hang = store.hang_on(operation)

    async with anyio.create_task_group() as tasks:

        async def repair() -> None:
            await penstock.repair(tmp_path / "c.safetensors", tmp_path / "new", store=store)

        tasks.start_soon(repair)
        await hang.wait_reached()
        tasks.cancel_scope.cancel()
        hang.release()

    assert store.open_files == 0
    left = {"c.safetensors", "new"} if operation == "publish" else {"c.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} <= left


def test_the_command_says_what_became_of_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [one(tmp_path, str(step), tree(step)) for step in range(2)]
    spoil(steps[0], "a")
    spoil(steps[0], "b.0")

    assert main(["repair", str(steps[0]), str(tmp_path / "new"), "--other", str(steps[1])]) == 1

    said = capsys.readouterr().out
    assert "1 taken, 1 gone" in said
    assert "safetensors)" in said
    assert "OCDBT" not in said
