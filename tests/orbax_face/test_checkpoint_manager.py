"""The same script on both libraries: which steps managers save, keep, find and call the best."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from etils import epath
from tests.orbax_face.differences import differences
from tests.orbax_face.signatures import methods_of, signature_difference

import penstock.orbax
from penstock import steps
from penstock.handlers import LocalStore

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
NAMES = ("penstock", "orbax")
PAIRS = [LIBRARIES, LIBRARIES[::-1]]
both = pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
across = pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=["to orbax", "from orbax"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]


def tree(step: int = 0) -> dict[str, Any]:
    return {"w": jnp.arange(4, dtype=jnp.float32) + step, "step": step}


def shown(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


def loss(metrics: Any) -> float:
    return float(metrics["loss"])


def run(ocp: Any, root: Path, options: dict[str, Any], steps: Any = range(6), **losses: Any) -> list[Any]:
    """Save steps; say which saves were done, what is left and what is best."""
    given = {"w": [5.0, 1.0, 3.0, 2.0, 4.0, 6.0]} | losses
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options)) as manager:
        done = []
        for at, step in enumerate(steps):
            metric = given["w"][at % 6]
            metrics = None if metric is None else {"loss": metric}
            done.append(manager.save(step, args=ocp.args.StandardSave(tree(step)), metrics=metrics))

        manager.wait_until_finished()
        found = [done, list(manager.all_steps()), manager.latest_step(), manager.best_step()]
        if not options.get("enable_background_delete"):  # Orbax's own listing can fail beside its deletion
            manager.reload()

        found.append(list(manager.all_steps()))

    return [*found, sorted(path.name for path in root.iterdir())]


DAYS = datetime.timedelta(days=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "interval": {"save_interval_steps": 2},
    "interval and steps": {"save_interval_steps": 3, "save_on_steps": [1, 4]},
    "last": {"max_to_keep": 2},
    "none": {"max_to_keep": 0},
    "period": {"max_to_keep": 1, "keep_period": 2},
    "time": {"max_to_keep": 1, "keep_time_interval": DAYS},
    "best": {"max_to_keep": 2, "best_fn": loss},
    "least": {"max_to_keep": 2, "best_fn": loss, "best_mode": "min"},
    "best, all": {"best_fn": loss},
    "named": {"step_prefix": "step", "step_format_fixed_length": 4, "max_to_keep": 3},
    "function": {"should_save_fn": (lambda step, _: step in (1, 2, 5))},
    "synchronous": {"enable_async_checkpointing": False, "max_to_keep": 2},
    "background": {"enable_background_delete": True, "max_to_keep": 2},
    "moved": {"todelete_subdir": "old", "max_to_keep": 2},
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_managers_of_both_libraries_save_and_keep_the_same_steps(
    options: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for ocp, name in zip(LIBRARIES, NAMES, strict=True):
        results = run(ocp, tmp_path / name, dict(options))
        if options.get("enable_background_delete"):
            results[4] = results[1]  # reloaded while it may still be deleting

        found.append(results)

    assert found[0] == found[1]


@dataclasses.dataclass(frozen=True)
class DeletedWhileRead:
    """A step that was found, and of which a document is gone when it is opened."""

    step: int
    path: Any

    @property
    def commit_timestamp(self) -> Any:
        (document,) = self.path.glob("_CHECKPOINT_METADATA")
        shutil.rmtree(self.path)
        return LocalStore().read_file(str(document))


@dataclasses.dataclass(frozen=True)
class DeletedWhileListed:
    """Names of steps of which another process deletes one, as soon as it was found or is read."""

    names: Any
    doomed: int
    when: str

    def build_name(self, step: int) -> Any:
        return self.names.build_name(step)

    def find_all(self, base_path: Any) -> Any:
        for found in self.names.find_all(base_path):
            if found.step == self.doomed and self.when == "found":
                shutil.rmtree(found.path)

            is_read = found.step == self.doomed and self.when == "read"
            yield DeletedWhileRead(found.step, found.path) if is_read else found

    def find_step(self, base_path: Any, step: int) -> Any:
        return self.names.find_step(base_path, step)


@pytest.mark.parametrize("when", ["found", "read"])
def test_a_step_that_is_deleted_while_steps_are_listed_is_left_out(tmp_path: Path, when: str) -> None:
    ocp = penstock.orbax
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.StandardSave(tree(step)))

    names = DeletedWhileListed(ocp.path.step.standard_name_format(), doomed=1, when=when)
    options = ocp.CheckpointManagerOptions(step_name_format=names)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert list(manager.all_steps()) == [0, 2]


@pytest.mark.parametrize("keep", [True, False])
def test_steps_without_metrics(keep: bool, tmp_path: Path) -> None:
    options = {"max_to_keep": 1, "best_fn": loss, "keep_checkpoints_without_metrics": keep}
    losses = [3.0, None, 2.0, None, 1.0, None]
    found = [run(ocp, tmp_path / name, options, w=losses) for ocp, name in zip(LIBRARIES, NAMES, strict=True)]
    assert found[0] == found[1]


POLICIES: dict[str, Callable[[Any], Any]] = {
    "latest": lambda of: of.LatestN(2),
    "steps": lambda of: of.EveryNSteps(3),
    "steps, about": lambda of: of.EveryNSteps(4, exact_interval=False, max_to_keep=1),
    "closest": lambda of: of.EveryNStepsClosest(3),
    "custom": lambda of: of.CustomSteps([1, 2]),
    "seconds": lambda of: of.EveryNSeconds(1000),
    "duration": lambda of: of.LatestDuration(DAYS),
    "best": lambda of: of.BestN(get_metric_fn=loss, n=2, reverse=True),
    "any": lambda of: of.AnyPreservationPolicy([of.LatestN(1), of.CustomSteps([2])]),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policies_keep_the_same_steps_as_in_orbax(policy: Any, tmp_path: Path) -> None:
    found = [
        run(ocp, tmp_path / name, {"preservation_policy": policy(ocp.checkpoint_managers)}, (0, 1, 2, 4, 7))
        for ocp, name in zip(LIBRARIES, NAMES, strict=True)
    ]
    assert found[0] == found[1]


DECISIONS: dict[str, Callable[[Any], Any]] = {
    "interval": lambda of: of.FixedIntervalPolicy(2),
    "steps": lambda of: of.AnySavePolicy([of.SpecificStepsPolicy([1, 4]), of.InitialSavePolicy()]),
    "preemption": lambda of: of.PreemptionCheckpointingPolicy(),
    "continuous": lambda of: of.ContinuousCheckpointingPolicy(minimum_interval_secs=1000),
}


@pytest.mark.parametrize("policy", DECISIONS.values(), ids=DECISIONS)
def test_policies_save_the_same_steps_as_in_orbax(policy: Any, tmp_path: Path) -> None:
    found = [
        run(ocp, tmp_path / name, {"save_decision_policy": policy(ocp.checkpoint_managers)})
        for ocp, name in zip(LIBRARIES, NAMES, strict=True)
    ]
    assert found[0] == found[1]


@across
def test_each_library_opens_what_the_other_wrote(writer: Any, reader: Any, tmp_path: Path) -> None:
    options = {"best_fn": loss, "best_mode": "min", "max_to_keep": 3}
    with writer.CheckpointManager(
        tmp_path, options=writer.CheckpointManagerOptions(**options), metadata={"lang": "en"}
    ) as manager:
        for step, value in enumerate([3.0, 1.0, 2.0, 5.0]):
            metrics = {"loss": value, "more": [1, {"a": None}]}
            args = writer.args.StandardSave(tree(step))
            manager.save(step, args=args, metrics=metrics, custom_metadata={"rate": step / 2})

    with reader.CheckpointManager(
        tmp_path, options=reader.CheckpointManagerOptions(**options), metadata={"lang": "other"}
    ) as manager:
        assert list(manager.all_steps()) == [0, 1, 2]
        assert manager.best_step() == 1
        assert manager.metrics(2) == {"loss": 2.0, "more": [1, {"a": None}]}
        assert manager.metadata().custom_metadata == {"lang": "en"}
        about = manager.metadata(2)
        assert about.custom_metadata == {"rate": 1.0}
        assert about.metrics["loss"] == 2.0
        restored = manager.restore(2, args=reader.args.StandardRestore(tree()))
        np.testing.assert_array_equal(restored["w"], tree(2)["w"])
        assert manager.save(4, args=reader.args.StandardSave(tree(4)), metrics={"loss": 0.5})
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [1, 2, 4]

    with writer.CheckpointManager(tmp_path, options=writer.CheckpointManagerOptions(**options)) as manager:
        assert manager.best_step() == 4
        np.testing.assert_array_equal(manager.restore(None)["w"], tree(4)["w"])


@across
def test_several_items_across_libraries(writer: Any, reader: Any, tmp_path: Path) -> None:
    with writer.CheckpointManager(tmp_path, item_names=("state", "config")) as manager:
        args = writer.args.Composite(
            state=writer.args.PyTreeSave(tree(3)), config=writer.args.JsonSave({"a": 1})
        )
        manager.save(3, args=args)
        manager.wait_until_finished()
        restored = manager.restore(3)
        assert restored.config == {"a": 1}

    with reader.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(3)
        assert sorted(restored) == ["config", "state"]
        np.testing.assert_array_equal(restored["state"]["w"], tree(3)["w"])
        args = reader.args.Composite(config=reader.args.JsonRestore())
        assert dict(manager.restore(3, args=args)) == {"config": {"a": 1}}


@both
def test_what_is_said_of_items(ocp: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "one") as manager:
        manager.save(0, args=ocp.args.StandardSave(tree()))
        manager.wait_until_finished()
        assert manager.item_metadata(0)["w"].shape == (4,)
        assert manager.metrics(0) is None
    with ocp.CheckpointManager(tmp_path / "two") as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave(tree())))
        manager.wait_until_finished()
        about = manager.metadata(0)
        assert about.item_metadata.state["w"].shape == (4,)
        assert list(about.item_handlers) == ["state"]
    with ocp.CheckpointManager(tmp_path / "two") as manager:
        assert manager.metadata().custom_metadata == {}
        assert list(manager.item_metadata(0)) == ["state"]


@both
def test_the_old_style_of_managers_with_handlers_works(ocp: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "one", ocp.PyTreeCheckpointer()) as manager:
        assert manager.save(1, tree(1), save_kwargs={"save_args": None})
        np.testing.assert_array_equal(manager.restore(1)["w"], tree(1)["w"])
        np.testing.assert_array_equal(manager.restore(1, items=tree())["w"], tree(1)["w"])
    checkpointers = {
        "state": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
        "config": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    with ocp.CheckpointManager(tmp_path / "two", checkpointers) as manager:
        assert manager.save(1, {"state": tree(1), "config": {"a": 1}})
        manager.wait_until_finished()
        restored = manager.restore(1, items={"state": tree(), "config": None})
        assert restored["config"] == {"a": 1}
        assert list(manager.restore(1, restore_kwargs={"config": {}})) == ["config"]


@both
def test_handlers_and_registries(ocp: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "one", item_handlers=ocp.StandardCheckpointHandler()) as manager:
        manager.save(0, args=ocp.args.StandardSave(tree()))
        manager.wait_until_finished()
        assert sorted(manager.restore(0)) == ["step", "w"]

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for args in (ocp.args.StandardSave, ocp.args.StandardRestore):
        registry.add("state", args, ocp.StandardCheckpointHandler())
    with ocp.CheckpointManager(tmp_path / "two", handler_registry=registry) as manager:
        manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave(tree())))
        manager.wait_until_finished()
        assert sorted(manager.restore(0).state) == ["step", "w"]


def problems(ocp: Any, root: Path) -> list[type[BaseException]]:
    """Errors that every manager raises, as kinds that both libraries have."""
    scripts: list[Callable[[], object]] = []
    with ocp.CheckpointManager(root) as manager:
        scripts += [
            lambda: manager.restore(None),
            lambda: manager.save(0),
            lambda: manager.delete(3),
            lambda: manager.item_metadata(None),
        ]
        found = [kind_of(script) for script in scripts]
        manager.save(1, args=ocp.args.StandardSave(tree()))
        manager.wait_until_finished()
        scripts = [
            lambda: manager.save(1, args=ocp.args.StandardSave(tree()), force=True),
            lambda: manager.save(2, args=ocp.args.Composite(a=ocp.args.StandardSave(tree()))),
            lambda: manager.save(2, ocp.args.StandardSave(tree())),
            lambda: manager.save(2, args=tree()),
            lambda: manager.restore(7),
            lambda: manager.metadata(7),
            lambda: ocp.CheckpointManager(
                root, options=ocp.CheckpointManagerOptions(best_mode="most"), item_names=("a",)
            ),
            lambda: ocp.CheckpointManagerOptions(max_to_keep=-1),
            lambda: ocp.CheckpointManagerOptions(todelete_subdir="a", todelete_full_path="b"),
            lambda: ocp.CheckpointManager(
                root, item_names=("a",), handler_registry=ocp.handlers.DefaultCheckpointHandlerRegistry()
            ),
            lambda: ocp.CheckpointManager(root, ocp.PyTreeCheckpointer(), item_names=("a",)),
            lambda: ocp.CheckpointManager(
                root, item_names=("a",), item_handlers=ocp.StandardCheckpointHandler()
            ),
            lambda: ocp.CheckpointManager(root, checkpointers=3),
            lambda: ocp.CheckpointManager(
                root,
                options=ocp.CheckpointManagerOptions(
                    enable_async_checkpointing=False,
                    async_options=ocp.AsyncOptions(post_finalization_callback=print),
                ),
            ),
            lambda: ocp.CheckpointManager(
                root,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=1, preservation_policy=ocp.checkpoint_managers.LatestN(1)
                ),
            ),
        ]
        return found + [kind_of(script) for script in scripts]


def kind_of(script: Callable[[], object]) -> type[BaseException]:
    try:
        script()
    except Exception as error:
        return next(kind for kind in (FileNotFoundError, ValueError, KeyError) if isinstance(error, kind))

    pytest.fail("nothing was raised")


def test_errors_are_of_the_same_kinds(tmp_path: Path) -> None:
    found = [problems(ocp, tmp_path / name) for ocp, name in zip(LIBRARIES, NAMES, strict=True)]
    assert found[0] == found[1]


@both
def test_older_steps_and_what_is_there(ocp: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        args = ocp.args.StandardSave(tree())
        assert manager.save(5, args=args)
        assert not manager.save(5, args=args)
        assert not manager.save(3, args=args)
        assert not manager.should_save(4)
        assert manager.should_save(6)
        assert manager.save(3, args=args, force=True)
        manager.wait_until_finished()
        manager.reload()
        assert list(manager.all_steps()) == [3, 5]
        manager.delete(5)
        assert list(manager.all_steps(read=True)) == [3]
        assert not (tmp_path / "5").exists()
        assert not manager.is_saving_in_progress()
        assert not manager.reached_preemption(4)
        assert str(manager.directory) == str(tmp_path)


@both
def test_read_only(ocp: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree(1)))
    options = ocp.CheckpointManagerOptions(read_only=True, max_to_keep=1)
    assert (options.save_interval_steps, options.max_to_keep, options.create) == (0, None, False)
    with ocp.CheckpointManager(tmp_path, options=options, metadata={"a": 1}) as manager:
        assert not manager.save(2, args=ocp.args.StandardSave(tree()))
        manager.delete(1)
        assert list(manager.all_steps()) == [1]
        assert manager.metadata().custom_metadata == {"a": 1}
        assert manager.restore(1)["step"] == 1
    assert sorted(os.listdir(tmp_path)) == ["1"]


@both
def test_what_a_crash_left_is_removed_if_asked(ocp: Any, tmp_path: Path) -> None:
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree()))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [1]
    assert sorted(os.listdir(tmp_path)) == ["1"]


@both
def test_a_manager_of_another_directory_with_other_names(ocp: Any, tmp_path: Path) -> None:
    plain = ocp.step.standard_name_format()
    named = ocp.path.step.standard_name_format(step_prefix="step")
    with ocp.CheckpointManager(tmp_path / "one") as manager:
        manager.save(1, args=ocp.args.StandardSave(tree(1)))
    options = ocp.CheckpointManagerOptions(
        step_name_format=ocp.step.composite_name_format(named, [named, plain])
    )
    with ocp.CheckpointManager(tmp_path / "one", options=options) as manager:
        manager.save(2, args=ocp.args.StandardSave(tree(2)))
        manager.wait_until_finished()
        assert shown(tmp_path / "one") == ["1", "step_2"]
        manager.reload()
        assert list(manager.all_steps()) == [1, 2]
        assert [manager.restore(step)["step"] for step in (1, 2)] == [1, 2]
        manager.delete(1)
        assert shown(tmp_path / "one") == ["step_2"]
    with ocp.CheckpointManager(tmp_path / "two") as manager:
        manager.save(1, args=ocp.args.StandardSave(tree(1)))
    options = ocp.CheckpointManagerOptions(
        step_name_format=ocp.step.composite_name_format(plain, [plain] * 2)
    )
    with ocp.CheckpointManager(tmp_path / "two", options=options) as manager:
        assert list(manager.all_steps()) == [1]
    with ocp.CheckpointManager(tmp_path / "three") as manager:
        assert manager.restore(1, directory=tmp_path / "two")["step"] == 1
        assert manager.restore(None, directory=tmp_path / "two")["step"] == 1


def test_read_only_saves_nothing_even_if_forced(tmp_path: Path) -> None:
    options = penstock.orbax.CheckpointManagerOptions(read_only=True)
    with penstock.orbax.CheckpointManager(tmp_path, options=options) as manager:
        assert not manager.save(2, args=penstock.orbax.args.StandardSave(tree()), force=True)
    assert os.listdir(tmp_path) == []


class Failing:
    """What a save in the background fails with, once."""

    def __init__(self) -> None:
        self.fails = True

    def __call__(self) -> None:
        if self.fails:
            self.fails = False
            raise OSError(errno.ENOSPC, "no space")


@both
def test_a_save_that_fails_in_the_background(ocp: Any, tmp_path: Path) -> None:
    failing = Failing()
    failing.fails = False
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, async_options=ocp.AsyncOptions(post_finalization_callback=failing)
    )
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree(1)))
        manager.wait_until_finished()
        failing.fails = True
        manager.save(2, args=ocp.args.StandardSave(tree(2)))
        with pytest.raises(OSError, match="no space"):
            manager.wait_until_finished()

        assert not manager.is_saving_in_progress()
        manager.reload()
        assert list(manager.all_steps()) == [1]


def test_old_steps_stay_when_a_save_fails_and_the_failure_is_raised_once(tmp_path: Path) -> None:
    failing = Failing()
    failing.fails = False
    options = penstock.orbax.CheckpointManagerOptions(
        max_to_keep=1, async_options=penstock.orbax.AsyncOptions(post_finalization_callback=failing)
    )
    with penstock.orbax.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=penstock.orbax.args.StandardSave(tree(1)))
        manager.wait_until_finished()
        failing.fails = True
        manager.save(2, args=penstock.orbax.args.StandardSave(tree(2)))
        with pytest.raises(OSError, match="no space"):
            manager.save(3, args=penstock.orbax.args.StandardSave(tree(3)))

        assert list(manager.all_steps()) == [1]  # without looking at the directory again
        manager.check_for_errors()
        assert manager.save(3, args=penstock.orbax.args.StandardSave(tree(3)))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [3]
    assert sorted(os.listdir(tmp_path)) == ["3"]


def test_a_step_that_is_being_read_is_deleted_later(tmp_path: Path) -> None:
    options = penstock.orbax.CheckpointManagerOptions(max_to_keep=1)
    with penstock.orbax.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=penstock.orbax.args.StandardSave(tree(1)))
        manager.wait_until_finished()
        reading = LocalStore().hold_reading(str(tmp_path / "1"))
        manager.save(2, args=penstock.orbax.args.StandardSave(tree(2)))
        manager.wait_until_finished()
        assert shown(tmp_path) == ["1", "2"]
        reading.release()
    assert sorted(os.listdir(tmp_path)) == ["2"]


def test_a_step_that_is_saved_again_is_not_deleted_later(tmp_path: Path) -> None:
    options = penstock.orbax.CheckpointManagerOptions(
        preservation_policy=penstock.orbax.checkpoint_managers.LatestN(1)
    )
    with penstock.orbax.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=penstock.orbax.args.StandardSave(tree(1)))
        manager.wait_until_finished()
        reading = LocalStore().hold_reading(str(tmp_path / "1"))
        manager.save(2, args=penstock.orbax.args.StandardSave(tree(2)))
        manager.wait_until_finished()
        reading.release()
        manager.save(1, args=penstock.orbax.args.StandardSave(tree(5)), force=True)
        manager.wait_until_finished()
        assert manager.restore(1)["step"] == 5
    assert sorted(os.listdir(tmp_path)) == ["1"]


def test_a_step_that_is_being_read_is_not_deleted_by_hand(tmp_path: Path) -> None:
    with penstock.orbax.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=penstock.orbax.args.StandardSave(tree(1)))
        manager.wait_until_finished()
        reading = LocalStore().hold_reading(str(tmp_path / "1"))
        with pytest.raises(OSError, match="1") as caught:
            manager.delete(1)

        assert caught.value.errno == errno.EBUSY
        assert list(manager.all_steps()) == [1]
        reading.release()
        manager.delete(1)
        assert list(manager.all_steps()) == []


def test_a_policy_that_fails_does_not_lose_the_step(tmp_path: Path) -> None:
    options = penstock.orbax.CheckpointManagerOptions(best_fn=loss, max_to_keep=1)
    with penstock.orbax.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=penstock.orbax.args.StandardSave(tree()), metrics={"loss": 1.0})
        with pytest.raises(KeyError, match="loss"):
            manager.save(2, args=penstock.orbax.args.StandardSave(tree()), metrics={"other": 1.0})

        manager.wait_until_finished()
        manager.reload()
        assert list(manager.all_steps()) == [1, 2]


def test_what_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    options = {"best_fn": loss, "max_to_keep": 1}
    losses = [float("nan"), 1.0, float("inf"), float("-inf"), 0.5, float("nan")]
    found = run(penstock.orbax, tmp_path, options, w=losses)
    assert found[1:4] == [[1], 1, 1]


def test_metrics_may_be_arrays(tmp_path: Path) -> None:
    options = penstock.orbax.CheckpointManagerOptions(best_fn=loss)
    with penstock.orbax.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=penstock.orbax.args.StandardSave(tree()), metrics={"loss": jnp.float32(2)})
        manager.wait_until_finished()
        assert manager.metrics(1) == {"loss": 2.0}


async def test_inside_a_running_loop(tmp_path: Path) -> None:
    with penstock.orbax.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=penstock.orbax.args.StandardSave(tree(1)))
        assert manager.latest_step() == 1
        np.testing.assert_array_equal(manager.restore(1)["w"], tree(1)["w"])
        assert manager.item_metadata(1)["w"].shape == (4,)


def test_saves_are_logged_to_the_logger(tmp_path: Path) -> None:
    entries: list[Any] = []

    class Logger:
        def log_entry(self, entry: Any) -> None:
            entries.append(entry)

    with penstock.orbax.CheckpointManager(tmp_path, logger=Logger()) as manager:
        manager.save(1, args=penstock.orbax.args.StandardSave(tree()))

    assert [entry["step"] for entry in entries] == [1]


CLASSES = ("CheckpointManager", "CheckpointManagerOptions")


@pytest.mark.parametrize("name", CLASSES)
def test_signatures_are_orbax_s_or_the_table_says_how_they_differ(name: str) -> None:
    ours, theirs = (getattr(ocp, name) for ocp in LIBRARIES)
    missing = {method for method in methods_of(theirs) if not hasattr(ours, method)}
    found: list[Any] = [signature_difference(ours, theirs), *missing]
    found += [
        signature_difference(getattr(ours, method), getattr(theirs, method))
        for method in methods_of(theirs) & methods_of(ours)
        if callable(getattr(theirs, method))
    ]

    found = [problem for problem in found if problem is not None]
    assert not found or f"checkpoint_managers.{name}" in differences(), found


def test_options_have_orbax_s_fields() -> None:
    ours, theirs = (dataclasses.fields(ocp.CheckpointManagerOptions) for ocp in LIBRARIES)
    assert [field.name for field in ours] == [field.name for field in theirs]


POLICY_NAMES = [name for name in dir(orbax.checkpoint.checkpoint_managers) if name[0].isupper()]


@pytest.mark.parametrize("name", ["standard_name_format", "composite_name_format"])
def test_formats_have_orbax_s_signatures(name: str) -> None:
    ours, theirs = (getattr(ocp.path.step, name) for ocp in LIBRARIES)
    assert signature_difference(ours, theirs) is None


@pytest.mark.parametrize("name", sorted({*POLICY_NAMES} - {*CLASSES, "AbstractCheckpointManager"}))
def test_policies_have_orbax_s_signatures(name: str) -> None:
    ours, theirs = (getattr(ocp.checkpoint_managers, name) for ocp in LIBRARIES)
    methods = methods_of(theirs)
    if dataclasses.is_dataclass(theirs):
        assert signature_difference(ours, theirs) is None
    for method in methods:
        if callable(getattr(theirs, method)):
            assert signature_difference(getattr(ours, method), getattr(theirs, method)) is None


# What penstock adds: shared files, held steps, its own policies


def weights(seed: int = 0, nbytes: int = 1 << 18) -> Any:
    """What no codec makes smaller."""
    noise = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return jnp.asarray(noise.view(np.int32).reshape(256, -1))


def data_inodes(step: Path) -> dict[int, int]:
    """Numbers and sizes of the data files of a step."""
    files = [file for file in step.rglob("*") if file.is_file() and file.parent.name == "d"]
    return {file.stat().st_ino: file.stat().st_size for file in files}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_arrays_that_did_not_change_are_shared_between_steps(
    asynchronous: bool, use_ocdbt: bool, tmp_path: Path
) -> None:
    ocp = penstock.orbax
    frozen, more, head = weights(), weights(2), weights(1)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=asynchronous)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=handler) as manager:
        before: set[int] = set()
        for step in range(3):
            tree = {
                "frozen": frozen,
                "more": more,
                "head": head + step,
                "host": np.arange(5) + step,
                "step": step,
            }
            manager.save(step, args=ocp.args.PyTreeSave(tree))
            manager.wait_until_finished()
            there = {
                file.stat().st_ino
                for file in (tmp_path / str(step)).rglob("*")
                if file.is_file() and file.stat().st_size > 200_000
            }
            assert bool(before & there) is bool(step)
            assert there - before, "what changed is written anew"
            before = there

        assert manager.all_steps() == [2]

    restored = orbax.checkpoint.PyTreeCheckpointer().restore(tmp_path / "2" / "default")
    np.testing.assert_array_equal(restored["frozen"], frozen)
    np.testing.assert_array_equal(restored["head"], head + 2)
    np.testing.assert_array_equal(restored["host"], np.arange(5) + 2)


def test_what_was_restored_is_shared_with_the_next_step(tmp_path: Path) -> None:
    ocp = penstock.orbax
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": weights(nbytes=1 << 22)}))

    with ocp.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(0, args=ocp.args.StandardRestore())
        manager.save(1, args=ocp.args.StandardSave(restored))
        manager.wait_until_finished()
        assert set(data_inodes(tmp_path / "0")) & set(data_inodes(tmp_path / "1"))
        again = manager.restore(1, args=ocp.args.StandardRestore())
        np.testing.assert_array_equal(again["w"], weights(nbytes=1 << 22))


@pytest.mark.parametrize("harm", ["removed", "damaged", "replaced"])
def test_a_step_does_not_need_the_one_before(harm: str, tmp_path: Path) -> None:
    ocp, values = penstock.orbax, {"w": weights()}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(values))
        manager.wait_until_finished()
        if harm == "damaged":
            (tmp_path / "0" / "default" / "manifest.ocdbt").write_bytes(b"no")
        else:
            shutil.rmtree(tmp_path / "0")
        if harm == "replaced":
            other = ocp.StandardCheckpointer()
            other.save(tmp_path / "0" / "default", {"w": weights(9)})
            other.close()

        manager.save(1, args=ocp.args.StandardSave(values))
        manager.wait_until_finished()
        restored = manager.restore(1, args=ocp.args.StandardRestore())
        np.testing.assert_array_equal(restored["w"], values["w"])


def test_a_checkpointer_alone_shares_nothing(tmp_path: Path) -> None:
    checkpointer = penstock.orbax.PyTreeCheckpointer()
    tree = {"w": weights()}
    for at in range(2):
        checkpointer.save(tmp_path / str(at), tree)

    assert not set(data_inodes(tmp_path / "0")) & set(data_inodes(tmp_path / "1"))
    checkpointer.close()


def test_a_step_is_held_while_it_is_restored(tmp_path: Path) -> None:
    ocp = penstock.orbax
    seen: list[Any] = []

    class Looking(ocp.JsonCheckpointHandler):
        def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                LocalStore().hold(str(Path(directory).parent)).release()
            except OSError as error:
                seen.append(error.errno)

            return super().restore(directory, *args, **kwargs)

    registry, handler = ocp.handlers.create_default_handler_registry(), Looking()
    registry.add("default", ocp.args.JsonSave, handler)
    registry.add("default", ocp.args.JsonRestore, handler)
    with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        manager.save(0, args=ocp.args.JsonSave({"a": 1}))
        manager.wait_until_finished()
        manager.restore(0, args=ocp.args.JsonRestore())
        assert seen == [errno.EBUSY]
        LocalStore().hold(str(tmp_path / "0")).release()


def test_policies_of_penstock_are_accepted(tmp_path: Path) -> None:
    ocp = penstock.orbax
    options = ocp.CheckpointManagerOptions(
        save_decision_policy=steps.EverySteps(2) | steps.OnSteps([3]),
        preservation_policy=steps.KeepLast(1) | steps.KeepBest(1, "loss") | steps.KeepEvery(4),
    )
    losses = [5.0, 4.0, 1.0, 2.0, 3.0, 6.0, 7.0, 8.0]
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        done = [
            manager.save(step, args=ocp.args.StandardSave(tree(step)), metrics={"loss": losses[step]})
            for step in range(8)
        ]

    assert done == [True, False, True, True, True, False, True, False]
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.all_steps() == [0, 2, 4, 6]
        assert manager.save(8, args=ocp.args.StandardSave(tree(8)), metrics={"loss": 9.0})
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2, 4, 8]  # of 2, the loss is known from before


def test_policies_of_penstock_know_when_the_last_save_began(tmp_path: Path) -> None:
    ocp = penstock.orbax
    options = ocp.CheckpointManagerOptions(
        save_decision_policy=steps.EverySeconds(1000.0) | steps.FirstSave(),
        preservation_policy=steps.KeepRecent(0.0),
    )
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.save(0, args=ocp.args.StandardSave(tree()))
        assert not manager.save(1, args=ocp.args.StandardSave(tree()))
        manager.wait_until_finished()
        assert manager.all_steps() == [0]  # the last one always stays


# Waiting for steps of another process


def save_steps(ocp: Any, root: Path, *numbers: int, **options: Any) -> None:
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for number in numbers:
            manager.save(number, args=ocp.args.StandardSave(tree(number)))


@both
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 7), ({"until_step": 7}, 7), ({"until_step": 5}, 7), ({"until_step": 8, "timeout": 0}, -1)],
    ids=str,
)
def test_the_latest_step_is_waited_for(
    ocp: Any, options: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    save_steps(ocp, tmp_path, 3, 7)
    with ocp.checkpoint_utils.wait_for_new_checkpoint(epath.Path(tmp_path), **options) as step:
        assert step == expected
        snapshots = tmp_path / "_SNAPSHOTS"
        if step == 7:
            restored = ocp.StandardCheckpointer().restore(snapshots / "7" / "default", tree())
            assert restored["step"] == 7
            assert not (snapshots / "3").exists()

    assert not list(snapshots.glob("*"))


@both
def test_a_directory_that_never_comes_is_waited_for_until_the_timeout(ocp: Any, tmp_path: Path) -> None:
    asked: list[int] = []

    def enough() -> bool:
        asked.append(1)
        return len(asked) == 3

    waiting = ocp.checkpoint_utils.wait_for_new_checkpoint(
        epath.Path(tmp_path / "no"), timeout=0, timeout_fn=enough, seconds_to_sleep=0.001
    )
    with waiting as step:
        assert step == -1

    assert len(asked) == 3


@both
@pytest.mark.parametrize(
    "named", [{}, {"step_prefix": "run"}, {"step_prefix": "run", "step_format_fixed_length": 4}], ids=str
)
def test_steps_are_iterated_as_they_come(ocp: Any, named: dict[str, Any], tmp_path: Path) -> None:
    coming = iter([(3, 4), (6,), ()])

    def no_more() -> bool:
        more = next(coming, ())
        save_steps(ocp, tmp_path, *more, **named)
        return not more

    (tmp_path / "_SNAPSHOTS" / "left").mkdir(parents=True)
    found = ocp.checkpoint_utils.checkpoints_iterator(
        tmp_path, timeout=0, timeout_fn=no_more, seconds_to_sleep=0.001, **named
    )
    assert list(found) == [4, 6]
    assert not list((tmp_path / "_SNAPSHOTS").glob("*"))


def test_a_step_that_is_waited_for_is_not_deleted(tmp_path: Path) -> None:
    ocp = penstock.orbax
    save_steps(ocp, tmp_path, 1)
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.checkpoint_utils.wait_for_new_checkpoint(tmp_path) as step:
        assert step == 1
        with ocp.CheckpointManager(tmp_path, options=options) as manager:
            manager.save(2, args=ocp.args.StandardSave(tree(2)))
            manager.wait_until_finished()
            assert (tmp_path / "1").exists()

        assert (tmp_path / "1").exists()


def test_what_is_waited_for_has_the_signatures_of_orbax() -> None:
    for name in ("wait_for_new_checkpoint", "checkpoints_iterator"):
        mine, other = [getattr(ocp.checkpoint_utils, name) for ocp in LIBRARIES]
        assert signature_difference(mine, other) is None


@both
def test_a_subclass_says_which_steps_go(ocp: Any, tmp_path: Path) -> None:
    """As T5X does; Kauldron reads `_checkpoints`, Octo `_directory`."""

    class OfT5X(ocp.CheckpointManager):  # type: ignore[misc]  # of either library
        def _get_old_steps_to_remove(self) -> list[int]:
            assert str(self._directory) == str(tmp_path)
            return [info.step for info in self._checkpoints if info.step % 2 == 1 and info.step < 5]

    with OfT5X(tmp_path) as manager:
        for step in range(1, 5):
            manager.save(step, args=ocp.args.StandardSave(tree(step)))
            manager.wait_until_finished()

        assert list(manager.all_steps()) == [2, 4]

    assert shown(tmp_path) == ["2", "4"]


@both
@pytest.mark.parametrize("keeps_others", [False, True])
def test_the_best_steps_stay_by_metrics_that_a_subclass_notes_later(
    ocp: Any, tmp_path: Path, keeps_others: bool
) -> None:
    """T5X reads metrics from what its evaluations wrote, once a step is to be chosen."""
    measured = {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.2, 5: 0.3}

    class OfT5X(ocp.CheckpointManager):  # type: ignore[misc]  # of either library
        def _get_old_steps_to_remove(self) -> list[int]:
            assert self._track_best
            for info in self._checkpoints:
                if info.step in measured and info.step < 5:
                    info.metrics = {"accuracy": measured[info.step]}

            return cast("list[int]", super()._get_old_steps_to_remove())

    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        best_fn=lambda metrics: metrics["accuracy"],
        keep_checkpoints_without_metrics=keeps_others,
    )
    with OfT5X(tmp_path, options=options) as manager:
        for step in measured:
            manager.save(step, args=ocp.args.StandardSave(tree(step)))
            manager.wait_until_finished()

        assert manager.best_step() == 1
        assert [info.metrics for info in manager._checkpoints if info.step == 1] == [{"accuracy": 0.9}]

        manager.reload()  # it reads what is stored
        assert [info.metrics for info in manager._checkpoints if info.step == 1] == [None]

    assert shown(tmp_path) == (["1", "3", "5"] if keeps_others else ["1", "3"])


def test_metrics_that_are_noted_later_count_for_policies_of_penstock(tmp_path: Path) -> None:
    ocp = penstock.orbax

    class Noting(ocp.CheckpointManager):
        def _get_old_steps_to_remove(self) -> list[int]:
            for info in self._checkpoints:
                info.metrics = {"loss": {1: 0.1, 2: 0.5}.get(info.step, 0.3)}

            return super()._get_old_steps_to_remove()

    options = ocp.CheckpointManagerOptions(preservation_policy=steps.KeepBest(1, "loss"))
    with Noting(tmp_path, options=options) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave(tree(step)))
            manager.wait_until_finished()

    assert shown(tmp_path) == ["1", "3"]


@both
def test_a_checkpointer_that_saves_in_the_background_is_told_apart(ocp: Any) -> None:
    """As paxml does, of the one that a manager made."""
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as one, ocp.PyTreeCheckpointer() as other:
        assert ocp.checkpoint_manager.is_async_checkpointer(one)
        assert not ocp.checkpoint_manager.is_async_checkpointer(other)
