"""`PerProcess` in a job of one process: the value itself, and a target for what several saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import penstock
from penstock import PerProcess, SaveFormat
from penstock.errors import HandlerFailedError, InvalidLeafError, SpecError, StructureMismatchError

pytestmark = pytest.mark.anyio

VALUE = {"position": 3, "buffer": np.arange(5), "name": "x", "pair": (1, None)}
SAVED_BY_TWO = {f"process_{rank}-of-2": {"position": rank, "name": "x"} for rank in range(2)}


def positions(values: Sequence[Any], index: int, count: int) -> list[Any]:
    return [value["position"] for value in values[index::count]]


@pytest.mark.parametrize("form", [SaveFormat(), SaveFormat(rich_types=True)])
async def test_one_process_saves_the_value_itself(
    tmp_path: Path, assert_same: Callable[[object, object], None], form: SaveFormat
) -> None:
    async with penstock.Checkpointer(save_format=form) as opened:
        await (await opened.save(tmp_path / "a", {"it": PerProcess(VALUE), "w": np.ones(3)}))
        plain = await opened.restore(tmp_path / "a", like={"it": VALUE, "w": np.ones(3)})
        assert_same(plain["it"], VALUE)
        marked: Any = await opened.restore(tmp_path / "a", like={"it": PerProcess(VALUE), "w": np.ones(3)})
        assert_same(marked["it"].value, VALUE)
        if form.rich_types:
            assert (await opened.restore(tmp_path / "a"))["it"]["pair"] == (1, None)


@pytest.mark.parametrize("value", [7, None, (), np.arange(3)])
async def test_a_tree_may_be_marked_as_a_whole(
    tmp_path: Path, assert_same: Callable[[object, object], None], value: object
) -> None:
    async with penstock.Checkpointer() as opened:
        await (await opened.save(tmp_path / "a", PerProcess(value)))
        found = await opened.restore(tmp_path / "a", like=PerProcess(value))
        assert_same(found.value, value)
        assert_same(await opened.restore(tmp_path / "a", like=value), value)


async def test_a_marked_value_within_another_one_is_refused(tmp_path: Path) -> None:
    async with penstock.Checkpointer() as opened:
        with pytest.raises(InvalidLeafError, match=r"\['it'\]\.value\[0\]\.value: a PerProcess lies within"):
            await opened.save(tmp_path / "a", {"it": PerProcess([PerProcess(1)])})

    assert not list(tmp_path.iterdir())


async def test_what_another_number_of_processes_saved_is_refused_unless_it_is_divided(tmp_path: Path) -> None:
    async with penstock.Checkpointer() as opened:
        await (await opened.save(tmp_path / "a", {"it": SAVED_BY_TWO, "w": 1}))
        with pytest.raises(StructureMismatchError, match=r"\['it'\]: saved by 2 processes") as caught:
            await opened.restore(tmp_path / "a", like={"it": PerProcess(VALUE), "w": 0})

        reports: list[penstock.RestoreReport] = []
        like = {"it": PerProcess(None, positions), "w": 0}
        found = await opened.restore(tmp_path / "a", like=like, on_report=reports.append)

    assert [difference.key_path for difference in caught.value.differences] == ["['it']"]
    assert found == {"it": PerProcess([0, 1], positions), "w": 1}
    (change,) = reports[0].changes
    assert (change.kind, change.key_path) == ("computed", "['it']")


async def test_a_value_of_each_process_is_divided_with_other_options_given(tmp_path: Path) -> None:
    like = {"it": PerProcess(None, positions), "new": 5}
    async with penstock.Checkpointer() as opened:
        await (await opened.save(tmp_path / "a", {"it": SAVED_BY_TWO, "w": 1}))
        found = await opened.restore(tmp_path / "a", like=like, on_missing="keep", on_unexpected="skip")
        assert found == {"it": PerProcess([0, 1], positions), "new": 5}
        with pytest.raises(SpecError, match="`transforms` cannot be combined"):
            await opened.restore(tmp_path / "a", like=like, transforms={})
        with pytest.raises(SpecError, match=r"\['it'\] is to be divided anew"):
            async for _ in opened.stream(tmp_path / "a", like={"it": like["it"], "w": 0}):
                pass


async def test_a_function_that_fails_is_named(tmp_path: Path) -> None:
    def fails(values: Sequence[Any], index: int, count: int) -> object:
        raise ZeroDivisionError

    async with penstock.Checkpointer() as opened:
        await (await opened.save(tmp_path / "a", {"it": SAVED_BY_TWO}))
        with pytest.raises(HandlerFailedError, match="ZeroDivisionError") as caught:
            await opened.restore(tmp_path / "a", like={"it": PerProcess(None, fails)})

    assert caught.value.key_path == "['it']"


def test_a_per_process_value_is_a_node_with_one_child_for_jax() -> None:
    tree = {"it": PerProcess({"n": 1}, positions)}
    assert jax.tree.map(lambda x: x + 1, tree) == {"it": PerProcess({"n": 2}, positions)}
    ((path, _),) = jax.tree_util.tree_flatten_with_path(tree)[0]
    assert jax.tree_util.keystr(path) == "['it'].value['n']"
