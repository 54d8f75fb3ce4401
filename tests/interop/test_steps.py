"""One directory of steps, managed by penstock and by Orbax's CheckpointManager in turn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tests.own_files import listed

import penstock
from penstock.errors import NotACheckpointError
from penstock.items import Json
from penstock.steps import CheckpointManager, KeepBest, KeepLast, StepNames

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Orbax leaves event loops open
]

AssertSame = Callable[[Any, Any], None]
LOSSES = {0: 3.0, 5: 1.0, 10: 2.0, 15: 1.0}


def tree(step: int) -> dict[str, Any]:
    return {"params": {"w": jnp.full((4, 6), step, jnp.float32)}, "host": np.full(3, step), "n": step}


def by_loss(metrics: Any) -> float:
    return float(metrics["loss"])


def theirs(root: Path, **options: Any) -> ocp.CheckpointManager:
    chosen = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **options)
    return ocp.CheckpointManager(root, options=chosen)


async def save_ours(root: Path, **options: Any) -> None:
    async with CheckpointManager(root, metadata={"lang": "en"}, **options) as manager:
        for step, loss in LOSSES.items():
            await manager.save(step, tree(step), metrics={"loss": loss}, custom_metadata={"lr": step / 10})
            await manager.wait()


def save_theirs(root: Path, **options: Any) -> None:
    chosen = ocp.CheckpointManagerOptions(best_fn=by_loss, best_mode="min", **options)
    with ocp.CheckpointManager(root, options=chosen, metadata={"lang": "en"}) as manager:
        for step, loss in LOSSES.items():
            args = ocp.args.PyTreeSave(tree(step))
            manager.save(
                step, args=args, metrics={"loss": loss}, custom_metadata={"lr": step / 10}, force=True
            )


@pytest.mark.parametrize("mode", ["min", "max"])
async def test_orbax_opens_a_root_of_ours(tmp_path: Path, assert_same: AssertSame, mode: Any) -> None:
    await save_ours(tmp_path)
    with theirs(tmp_path, best_fn=by_loss, best_mode=mode) as manager:
        assert manager.all_steps() == list(LOSSES)
        assert manager.latest_step() == 15
        async with CheckpointManager(tmp_path, metric="loss", mode=mode) as ours:
            assert manager.best_step() == await ours.best_step() == {"min": 15, "max": 0}[mode]

        assert manager.metrics(5) == {"loss": 1.0}
        about = manager.metadata(10)
        assert about.custom_metadata == {"lr": 1.0}
        assert about.metrics == {"loss": 2.0}
        assert manager.metadata().custom_metadata == {"lang": "en"}

        like = tree(0)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with_args = manager.restore(5, args=ocp.args.PyTreeRestore(like))
        assert_same(jax.tree.map(np.asarray, with_args), jax.tree.map(np.asarray, tree(5)))

    with theirs(tmp_path) as manager:
        standard = manager.restore(15, args=ocp.args.StandardRestore(abstract))
        assert_same(jax.tree.map(np.asarray, standard), jax.tree.map(np.asarray, tree(15)))

    with theirs(tmp_path) as manager:
        without = manager.restore(10)
        assert_same(jax.tree.map(np.asarray, without), jax.tree.map(np.asarray, tree(10)))


async def test_ours_opens_a_root_of_orbax(tmp_path: Path, assert_same: AssertSame) -> None:
    save_theirs(tmp_path)
    async with CheckpointManager(tmp_path, metric="loss") as manager:
        assert list(manager.all_steps()) == list(LOSSES)
        with theirs(tmp_path, best_fn=by_loss, best_mode="min") as other:
            assert await manager.best_step() == other.best_step() == 15

        assert_same(await manager.restore(5, like=tree(0)), tree(5))
        assert (await manager.restore())["n"] == 15
        about = await manager.metadata(10)
        assert (about.metrics, about.custom_metadata) == ({"loss": 2.0}, {"lr": 1.0})
        assert about.tree["params"]["w"].shape == (4, 6)
        assert about.committed_at_ns is not None
        assert await manager.root_metadata() == {"lang": "en"}


async def test_each_library_resumes_from_steps_of_the_other(tmp_path: Path, assert_same: AssertSame) -> None:
    save_theirs(tmp_path)
    async with CheckpointManager(tmp_path, keep=KeepLast(1) | KeepBest(1, "loss", "max")) as manager:
        await manager.save(20, tree(20), metrics={"loss": 0.5})

    assert listed(tmp_path) == ["0", "20", "metadata"]
    with theirs(tmp_path, max_to_keep=2) as other:
        other.save(25, args=ocp.args.PyTreeSave(tree(25)))
        other.wait_until_finished()
        assert other.all_steps() == [20, 25]

    async with CheckpointManager(tmp_path) as manager:
        assert list(manager.all_steps()) == [20, 25]
        assert_same(await manager.restore(like=tree(0)), tree(25))
        assert (await manager.metadata(25)).metrics is None
        with pytest.raises(NotACheckpointError):
            await manager.restore(5)


async def test_several_items_go_both_ways(tmp_path: Path, assert_same: AssertSame) -> None:
    async with CheckpointManager(tmp_path / "ours") as manager:
        items = penstock.Composite(state=tree(1), config=Json({"a": [1, None]}))
        await manager.save(1, items, metrics={"loss": 1.0})

    with theirs(tmp_path / "ours") as other:
        found = other.restore(
            1, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(), config=ocp.args.JsonRestore())
        )
        assert found["config"] == {"a": [1, None]}
        assert_same(jax.tree.map(np.asarray, found["state"]), jax.tree.map(np.asarray, tree(1)))

    with theirs(tmp_path / "ours") as other:
        without = other.restore(1)
        assert without["config"] == {"a": [1, None]}
        assert_same(jax.tree.map(np.asarray, without["state"]), jax.tree.map(np.asarray, tree(1)))

    with theirs(tmp_path / "theirs") as other:
        saved = ocp.args.Composite(
            state=ocp.args.StandardSave({"w": jnp.ones(3)}), config=ocp.args.JsonSave({"b": 2})
        )
        other.save(7, args=saved)

    async with CheckpointManager(tmp_path / "theirs") as manager:
        restored = await manager.restore()
        assert restored["config"] == {"b": 2}
        assert_same(restored["state"], {"w": jnp.ones(3)})
        like = penstock.Composite(state={"w": jnp.zeros(3)})
        assert_same((await manager.restore(like=like))["state"], {"w": jnp.ones(3)})


@pytest.mark.parametrize(("prefix", "digits"), [("step", None), (None, 6), ("ckpt", 4)])
async def test_names_of_steps_agree(tmp_path: Path, prefix: str | None, digits: int | None) -> None:
    await save_ours(tmp_path / "ours", names=StepNames(prefix, digits))
    with theirs(tmp_path / "ours", step_prefix=prefix, step_format_fixed_length=digits) as other:
        assert other.all_steps() == list(LOSSES)
        assert other.restore(10)["n"] == 10

    save_theirs(tmp_path / "theirs", step_prefix=prefix, step_format_fixed_length=digits)
    async with CheckpointManager(tmp_path / "theirs", names=StepNames(prefix, digits)) as manager:
        assert list(manager.all_steps()) == list(LOSSES)
        assert (await manager.restore(10))["n"] == 10


async def test_linked_steps_are_whole_for_orbax(tmp_path: Path, assert_same: AssertSame) -> None:
    frozen = {"frozen": jnp.arange(50_000.0)}
    async with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        for step in range(3):
            await manager.save(step, {**frozen, "n": jnp.full(7, step)})
            await manager.wait()

    assert listed(tmp_path) == ["2"]
    with theirs(tmp_path) as other:
        found = other.restore(2)
        assert_same(
            jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, {**frozen, "n": jnp.full(7, 2)})
        )


async def test_orbax_takes_what_ours_left_half_way_for_what_it_is(tmp_path: Path) -> None:
    await save_ours(tmp_path)
    (tmp_path / "deleted_3.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "20.orbax-checkpoint-tmp").mkdir()
    with theirs(tmp_path, cleanup_tmp_directories=True) as other:
        assert other.all_steps() == list(LOSSES)
        other.save(30, args=ocp.args.PyTreeSave(tree(30)))

    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


async def test_a_version_1_root_of_orbax_is_read(tmp_path: Path) -> None:
    from orbax.checkpoint import v1 as ocp1

    with ocp1.training.Checkpointer(str(tmp_path)) as other:
        other.save(4, {"w": jnp.ones(3), "n": 4}, metrics={"loss": 0.25})

    async with CheckpointManager(tmp_path, metric="loss") as manager:
        assert list(manager.all_steps()) == [4]
        assert await manager.best_step() == 4
        found = await manager.restore(item="state")
        assert found["n"] == 4
        assert (await manager.metadata(4)).metrics == {"loss": 0.25}
