"""A damaged checkpoint, and what is left of it in a new one."""

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
from tests.every_item import every_item
from tests.unsealed import unseal

import penstock
from penstock import RepairReport
from penstock.cli import main
from penstock.errors import CorruptCheckpointError, PathError, SpecError
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax import survey_item
from penstock.testing import FaultyStore

AssertSame = Callable[[Any, Any], None]


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tree(step: int = 0) -> Any:
    """Of which only `b` changes from step to step."""
    return {
        "a": noise(300, 10),
        "b": [noise(500, seed=step), noise(7)],
        "n": np.int32(3),
        "text": "t",
        "none": None,
    }


FORMATS = {
    "ocdbt": penstock.SaveFormat(),
    "zstd": penstock.SaveFormat(codec="zstd"),
    "directories": penstock.SaveFormat(ocdbt=False),
    "zarr3": penstock.SaveFormat(zarr=3, codec="zstd"),
}


def save(path: Path, value: Any, form: penstock.SaveFormat | None = None, **options: Any) -> Path:
    with penstock.sync.Checkpointer(save_format=form) as checkpointer:
        checkpointer.save(path, value, **options).result()

    return path


def spoil(path: Path, key_path: str, item: str = "") -> None:
    """Flip one bit of a leaf."""
    ranges = survey_item(LocalStore(), str(path), item).ranges
    found = next(found for found in ranges if key_path in found.key_paths)
    file = Path(found.file)
    data = bytearray(file.read_bytes())
    data[found.checksum.offset] ^= 1
    file.write_bytes(data)


def outcomes(report: RepairReport) -> dict[str, str]:
    return {leaf.name: leaf.outcome for leaf in report.leaves}


@pytest.mark.parametrize("form", FORMATS)
def test_every_intact_leaf_is_kept_and_the_damaged_one_is_named(
    tmp_path: Path, form: str, assert_same: AssertSame
) -> None:
    source = save(tmp_path / "c", tree(), FORMATS[form], custom_metadata={"who": "me"})
    spoil(source, "['b'][0]")

    report = penstock.sync.repair(source, tmp_path / "new")

    assert [(leaf.key_path, leaf.outcome) for leaf in report.gone] == [("['b'][0]", "gone")]
    assert "not those that were written" in report.gone[0].problem
    assert not report.complete
    assert penstock.sync.verify(tmp_path / "new").intact
    assert penstock.sync.metadata(tmp_path / "new").custom_metadata == {"who": "me"}
    like = tree()
    like["b"][0] = np.zeros(500, np.float32)
    assert_same(penstock.sync.restore(tmp_path / "new", like=like, on_missing="keep"), like)


@pytest.mark.parametrize("form", FORMATS)
def test_a_leaf_is_taken_from_another_step_where_it_is_the_same(
    tmp_path: Path, form: str, assert_same: AssertSame
) -> None:
    steps = [save(tmp_path / str(step), tree(step), FORMATS[form]) for step in range(3)]
    spoil(steps[1], "['a']")
    spoil(steps[1], "['b'][0]")
    spoil(steps[0], "['a']")

    report = penstock.sync.repair(steps[1], tmp_path / "new", others=[steps[0], steps[2]])

    assert [(leaf.key_path, leaf.taken_from) for leaf in report.taken] == [("['a']", str(steps[2]))]
    assert [leaf.key_path for leaf in report.gone] == ["['b'][0]"]
    assert_same(penstock.sync.restore(tmp_path / "new", only="a"), {"a": tree()["a"]})


def test_what_is_taken_is_copied_and_not_linked(tmp_path: Path) -> None:
    source, other = (save(tmp_path / name, {"a": noise(5000)}) for name in ("c", "other"))
    spoil(source, "['a']")

    report = penstock.sync.repair(source, tmp_path / "new", others=[other])

    assert report.complete
    assert all(file.stat().st_nlink == 1 for file in (tmp_path / "new").rglob("*") if file.is_file())
    shutil.rmtree(other)
    assert penstock.sync.restore(tmp_path / "new")["a"].tobytes() == noise(5000).tobytes()


def test_another_steps_damaged_leaf_is_not_taken(tmp_path: Path) -> None:
    source, other = (save(tmp_path / name, {"a": noise(50), "b": noise(3)}) for name in ("c", "other"))
    spoil(source, "['a']")
    spoil(other, "['a']")

    assert [leaf.name for leaf in penstock.sync.repair(source, tmp_path / "new", others=[other]).gone] == [
        "['a']"
    ]


ITEMS: Any = every_item(tree())


def test_items_are_repaired_one_by_one(tmp_path: Path, assert_same: AssertSame) -> None:
    source = save(tmp_path / "c", ITEMS, custom_metadata={"who": "me"})
    other = save(tmp_path / "other", ITEMS)
    spoil(source, "['a']", "state")
    spoil(source, "['checkpoint']", "scale")
    (source / "config" / "metadata").write_bytes(b'{"lr": 0.4}')

    report = penstock.sync.repair(source, tmp_path / "new", others=[other])

    assert report.complete
    assert_same(penstock.sync.restore_items(tmp_path / "new"), penstock.sync.restore_items(other))
    assert {leaf.name for leaf in report.taken} == {"(all of it)", "state ['a']", "scale ['checkpoint']"}
    assert penstock.sync.metadata(tmp_path / "new", item="state").custom_metadata == {"who": "me"}


def test_an_item_whose_document_is_damaged_is_gone(tmp_path: Path) -> None:
    source = save(tmp_path / "c", ITEMS)
    (source / "config" / "metadata").write_bytes(b'{"lr": 0.4}')

    report = penstock.sync.repair(source, tmp_path / "new")

    assert [(leaf.name, leaf.problem) for leaf in report.gone] == [
        ("config", "metadata differs from what was written")
    ]
    assert "config" not in penstock.sync.restore_items(tmp_path / "new")


@pytest.mark.parametrize("document", ["_METADATA", "_sharding", "_strings.json", "w/.zarray"])
def test_a_document_is_taken_from_another_step_where_it_is_the_same(
    tmp_path: Path, document: str, assert_same: AssertSame
) -> None:
    form = FORMATS["directories"]
    source, other = (
        save(tmp_path / str(seed), {"w": jax.numpy.full(9, seed), "text": "t"}, form) for seed in range(2)
    )
    data = bytearray((source / document).read_bytes())
    data[len(data) // 2] ^= 1
    (source / document).write_bytes(data)

    report = penstock.sync.repair(source, tmp_path / "new", others=[other])

    assert report.complete
    assert_same(penstock.sync.restore(tmp_path / "new"), {"w": jax.numpy.full(9, 0), "text": "t"})


def test_a_lost_file_takes_only_what_was_in_it(tmp_path: Path) -> None:
    source = save(tmp_path / "c", tree(), FORMATS["directories"])
    shutil.rmtree(source / "a")

    report = penstock.sync.repair(source, tmp_path / "new")

    assert [leaf.name for leaf in report.gone] == ["['a']"]
    assert "['a']" not in penstock.sync.restore(tmp_path / "new")


@pytest.mark.parametrize("document", ["_sharding", "_CHECKPOINT_METADATA", "array_metadatas/process_0"])
def test_a_damaged_document_that_arrays_can_do_without_is_named(tmp_path: Path, document: str) -> None:
    source = save(tmp_path / "c", {"a": jax.numpy.arange(5.0)})
    (source / document).write_bytes(b"{")

    report = penstock.sync.repair(source, tmp_path / "new")

    assert len(report.gone) == 1
    assert np.asarray(penstock.sync.restore(tmp_path / "new")["a"]).tolist() == [0, 1, 2, 3, 4]


def test_what_has_no_checksum_is_kept_and_said(tmp_path: Path) -> None:
    source = save(tmp_path / "c", {"a": noise(5)})
    unseal(source)
    (source / "_PENSTOCK_INTEGRITY").unlink()

    report = penstock.sync.repair(source, tmp_path / "new")

    assert [leaf.name for leaf in report.unchecked] == ["['a']"]
    assert not report.complete


class TestRefusals:
    def test_a_directory_of_steps(self, tmp_path: Path) -> None:
        with penstock.sync.CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, {"a": noise(3)})

        with pytest.raises(SpecError, match="is a directory of steps; repair one of them"):
            penstock.sync.repair(tmp_path / "run", tmp_path / "new")

    def test_a_target_that_is_the_source_or_lies_in_it(self, tmp_path: Path) -> None:
        source = save(tmp_path / "c", {"a": noise(3)})
        for target in (source, source / "inside"):
            with pytest.raises(PathError):
                penstock.sync.repair(source, target, overwrite=True)

    def test_a_checkpoint_without_an_intact_leaf_is_refused(self, tmp_path: Path) -> None:
        source = save(tmp_path / "c", {"a": noise(3)})
        for file in (source / "d").iterdir():
            file.write_bytes(b"x")
        with pytest.raises(CorruptCheckpointError):
            penstock.sync.repair(source, tmp_path / "new")

        assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    "operation", ["open_data_file", "file.read_at", "data.write_at", "data.sync", "publish"]
)
async def test_cancelled_midway_leaves_nothing(tmp_path: Path, operation: str) -> None:
    await penstock.save(tmp_path / "c", tree())
    store = FaultyStore(LocalStore())
    hang = store.hang_on(operation)

    async with anyio.create_task_group() as tasks:

        async def repair() -> None:
            await penstock.repair(tmp_path / "c", tmp_path / "new", store=store)

        tasks.start_soon(repair)
        await hang.wait_reached()
        tasks.cancel_scope.cancel()
        hang.release()

    assert store.open_files == 0
    assert {path.name for path in tmp_path.iterdir()} <= ({"c", "new"} if operation == "publish" else {"c"})


def test_the_command_says_what_became_of_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [save(tmp_path / str(step), tree(step)) for step in range(2)]
    spoil(steps[0], "['a']")
    assert main(["repair", str(steps[0]), str(tmp_path / "whole"), "--other", str(steps[1])]) == 0
    spoil(steps[0], "['b'][0]")
    arguments = ["repair", str(steps[0]), str(tmp_path / "new"), "--other", str(steps[1])]

    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert f"{tmp_path / 'new'}: " in said
    assert "1 taken" in said
    assert "1 gone" in said
    assert main([*arguments, "--overwrite", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["complete"] is False
    assert len(document["leaves"]) == 6
