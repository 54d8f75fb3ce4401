"""Values that are known to lie in a step, so that the next one links to its files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import penstock.orbax as ocp
from penstock.directory_builds import DirectoryBuild
from penstock.handlers import LocalStore
from penstock.orbax.enclosing_save import StepLinks


def test_what_is_known_of_a_step_is_noted_before_anybody_can_replace_it(tmp_path: Path) -> None:
    store, final, told = LocalStore(), tmp_path / "1", list[tuple[object, str]]()

    def note(built: str, to: str) -> None:
        assert not final.exists()
        told.append((store.identity(built), to))

    links = StepLinks(str(final), None)
    building = DirectoryBuild(store, str(final), before_publishing=links.complete)
    links.when_complete(f"{building.path}/default.orbax-checkpoint-tmp", note)
    building.create()
    (Path(building.path) / "default").mkdir()
    building.publish(synced=False)

    assert told == [(store.identity(str(final / "default")), str(final / "default"))]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_several_processes_saved_is_told_apart_from_what_replaced_it(
    tmp_path: Path, is_replaced: bool
) -> None:
    place, final, told = (
        tmp_path / "1.orbax-checkpoint-tmp" / "an id",
        tmp_path / "1",
        list[tuple[str, bool]](),
    )
    links = StepLinks(str(final), str(tmp_path / "0"))
    item = place / "default"
    item.mkdir(parents=True)
    assert links.base_of_place(str(place), str(item)) == str(tmp_path / "0" / "default")
    links.when_published(str(place), str(item), lambda path, is_same: told.append((path, is_same())))
    links.written()
    (item / "mark").touch()  # by the primary, once all have written
    place.rename(final)
    if is_replaced:
        shutil.rmtree(final)
        (final / "default").mkdir(parents=True)

    links.published()
    assert told == [(str(final / "default"), not is_replaced)]


def test_what_is_no_item_of_the_step_is_not_linked(tmp_path: Path) -> None:
    step, place = str(tmp_path / "1"), str(tmp_path / "1.orbax-checkpoint-tmp" / "an id")
    links = StepLinks(step, str(tmp_path / "0"))
    assert links.base_of_place(place, f"{place}/own/tree") is None  # which a handler made in its item
    assert links.base_of_place(str(tmp_path / "2.orbax-checkpoint-tmp" / "x"), f"{place}/default") is None
    assert StepLinks(step, None).base_of_place(place, f"{place}/default") is None


def test_an_unchanged_step_is_linked_to_the_one_before(tmp_path: Path) -> None:
    names: Any = ocp
    tree = {"w": jnp.arange(30_000)}
    handler = names.PyTreeCheckpointHandler(use_compression=False)
    with names.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=names.args.PyTreeSave(tree))

    files = {path for path in (tmp_path / "3").rglob("d/*") if path.stat().st_size > 10_000}
    assert {path.stat().st_nlink for path in files} == {3}


def test_a_step_may_be_deleted_to_which_the_next_one_is_being_linked(tmp_path: Path) -> None:
    names: Any = ocp
    tree = {"w": jnp.arange(30_000)}
    handler = names.PyTreeCheckpointHandler(use_compression=False)
    with names.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        for step in range(5):
            manager.save(step, args=names.args.PyTreeSave(tree))
            if step:
                manager.delete(step - 1)

        assert manager.all_steps() == [4]
        assert bool((manager.restore(4)["w"] == tree["w"]).all())
