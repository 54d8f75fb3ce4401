"""Directories of steps in the newer API: the same script on both libraries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from anyio import to_thread

import penstock.orbax.v1 as penstock_v1
from penstock.errors import ConfigError
from penstock.orbax.v1.handlers import local_registry
from penstock.steps import EverySteps, KeepLast

TREE = {"w": np.arange(8.0), "step": 0}


def state(step: int) -> Any:
    return {**TREE, "step": step}


def saved(ocp: Any, directory: Path, steps: Any, **options: Any) -> None:
    with ocp.training.Checkpointer(directory, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step))


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


def test_each_step_is_saved_and_the_latest_loaded(ocp: Any, tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        assert not checkpointer.latest
        assert all(checkpointer.save(step, state(step)) for step in range(3))
        assert [found.step for found in checkpointer.checkpoints] == [0, 1, 2]
        assert checkpointer.latest.path == checkpointer.directory / "2"
        assert checkpointer.load()["step"] == 2
        assert checkpointer.load(1)["step"] == 1
        assert checkpointer.load(checkpointer.checkpoints[0])["step"] == 0
        wanted = {"w": np.zeros(8, np.float32), "step": 0}
        assert checkpointer.load(2, wanted)["w"].dtype == np.float32


def test_a_step_and_each_of_its_items_have_a_mark(ocp: Any, tmp_path: Path) -> None:
    """Programs tell by it what is whole: Keras and MaxText have such steps."""
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_checkpointables(1, {"tree": TREE, "config": {"x": 1}}, metrics={"loss": 0.5})

    marks = {str(path.parent.relative_to(tmp_path / "run")) for path in tmp_path.rglob("commit_success.txt")}
    assert marks - {"metadata"} == {"1", "1/config", "1/metrics", "1/tree"}


def test_each_library_continues_a_run_of_the_other(writer_and_reader: Any, tmp_path: Path) -> None:
    writer, reader = writer_and_reader
    with writer.training.Checkpointer(tmp_path, custom_metadata={"run": 1}) as checkpointer:
        checkpointer.save(3, state(3), metrics={"loss": 0.5}, custom_metadata={"final": False})

    with reader.training.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.root_metadata().custom_metadata == {"run": 1}
        assert checkpointer.latest.metrics == {"loss": 0.5}
        assert checkpointer.metadata().custom_metadata == {"final": False}
        assert checkpointer.metadata(3).metrics == {"loss": 0.5}
        assert checkpointer.metadata().metadata["w"].shape == (8,)
        assert set(checkpointer.checkpointables_metadata().metadata) == {"state"}
        assert checkpointer.load()["step"] == 3
        assert checkpointer.save(4, state(4))
    assert steps_in(tmp_path) == [3, 4]


def test_a_policy_says_when(ocp: Any, tmp_path: Path) -> None:
    policy = ocp.training.save_decision_policies.FixedIntervalPolicy(3)
    with ocp.training.Checkpointer(tmp_path, save_decision_policy=policy) as checkpointer:
        assert [checkpointer.save(step, state(step), force=step == 5) for step in range(7)] == [
            *(True, False, False),
            *(True, False, True, True),
        ]
        assert checkpointer.save_async(8, state(8)) is None
        assert [checkpointer.should_save(step) for step in (3, 8, 9)] == [False, False, True]


def test_a_policy_says_what_stays(ocp: Any, tmp_path: Path) -> None:
    policies = ocp.training.preservation_policies
    policy = policies.AnyPreservationPolicy([policies.LatestN(2), policies.EveryNSteps(4)])
    with ocp.training.Checkpointer(tmp_path, preservation_policy=policy) as checkpointer:
        for step in range(7):
            checkpointer.save(step, state(step))
        assert [found.step for found in checkpointer.checkpoints] == [0, 4, 5, 6]
        assert steps_in(tmp_path) == [0, 4, 5, 6]


def test_the_best_steps_stay(ocp: Any, tmp_path: Path) -> None:
    policies = ocp.training.preservation_policies
    policy = policies.BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=2)
    with ocp.training.Checkpointer(tmp_path, preservation_policy=policy) as checkpointer:
        for step, loss in enumerate([0.5, 0.1, 0.4, 0.3]):
            checkpointer.save(step, state(step), metrics={"loss": loss})
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        assert [found.metrics["loss"] for found in checkpointer.checkpoints] == [0.1, 0.3]


def test_a_step_that_exists_is_replaced_only_if_asked(ocp: Any, tmp_path: Path) -> None:
    saved(ocp, tmp_path, [1, 2])
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ocp.training.errors.StepAlreadyExistsError):
            checkpointer.save(2, state(7))
        assert checkpointer.save(2, state(8), overwrite=True)
        assert not checkpointer.save(1, state(9), overwrite=True)  # as the policy sees it, it is old
        assert checkpointer.save(1, state(9), overwrite=True, force=True)
        assert [checkpointer.load(step)["step"] for step in (1, 2)] == [9, 8]


@pytest.mark.parametrize("ask", ["load", "metadata", "checkpointables_metadata", "delete"])
def test_loading_a_missing_step_is_an_error(ocp: Any, tmp_path: Path, ask: str) -> None:
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ocp.training.errors.StepNotFoundError) as missing:
            getattr(checkpointer, ask)(7)
        assert isinstance(missing.value, FileNotFoundError)
        if ask != "delete":
            with pytest.raises(ocp.training.errors.StepNotFoundError):
                getattr(checkpointer, ask)()


def test_several_objects_are_one_step(ocp: Any, tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save_checkpointables(0, {"model": state(1), "rest": {"x": 2}})
        assert checkpointer.load_checkpointables(0, {"rest": None})["rest"] == {"x": 2}
        assert set(checkpointer.load_checkpointables()) == {"model", "rest"}
        assert checkpointer.delete(0, checkpointable_name="rest")
        assert set(checkpointer.load_checkpointables()) == {"model"}
        assert not checkpointer.delete(0, checkpointable_name="rest", missing_ok=True)


def test_a_step_is_deleted(ocp: Any, tmp_path: Path) -> None:
    saved(ocp, tmp_path, [0, 1, 2])
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.delete(checkpointer.checkpoints[1])
        assert checkpointer.delete_async(0).result()
        assert [found.step for found in checkpointer.checkpoints] == [2]
        assert not checkpointer.delete(0, missing_ok=True)
        assert steps_in(tmp_path) == [2]


def test_steps_are_named_as_asked(ocp: Any, tmp_path: Path) -> None:
    step = ocp.path.step
    padded = step.standard_name_format(step_prefix="at", step_format_fixed_length=4)
    saved(ocp, tmp_path, [7], step_name_format=padded)
    assert (tmp_path / "at_0007").is_dir()
    assert [(one.step, one.path.name) for one in padded.find_all(tmp_path)] == [(7, "at_0007")]
    assert padded.find_step(tmp_path, 7).commit_timestamp_nsecs > 0

    plain = step.standard_name_format()
    both = step.composite_name_format(plain, [plain, padded])
    assert sorted(one.step for one in both.find_all(tmp_path)) == [7]
    with pytest.raises(ValueError, match="read"):
        step.composite_name_format(plain, [padded])


def test_steps_of_two_names_are_loaded(tmp_path: Path) -> None:  # Orbax looks for both under the new name
    step = penstock_v1.path.step
    saved(penstock_v1, tmp_path, [7], step_name_format=step.standard_name_format(step_prefix="at"))
    formats = [step.standard_name_format(), step.standard_name_format(step_prefix="at")]
    both = step.composite_name_format(formats[0], formats)
    with penstock_v1.training.Checkpointer(tmp_path, step_name_format=both) as checkpointer:
        checkpointer.save(8, state(8))
        assert [checkpointer.load(number)["step"] for number in (7, 8)] == [7, 8]
        assert [found.path.name for found in checkpointer.checkpoints] == ["at_7", "8"]


def test_other_writers_are_seen_on_reload(ocp: Any, tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        saved(ocp, tmp_path, [5])
        assert not checkpointer.latest
        checkpointer.reload()
        assert checkpointer.latest.step == 5


def test_a_step_is_saved_in_the_background(ocp: Any, tmp_path: Path) -> None:
    heard: list[bool] = []
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        value = np.zeros(4)
        saving = checkpointer.save_async(0, {"w": value})
        value += 1
        saving.on_complete(heard.append)
        assert saving.result()
        checkpointer.wait()
        assert checkpointer.load()["w"].tolist() == [0, 0, 0, 0]
        assert not checkpointer.is_saving_in_progress()
    assert heard == [True]


class Gate:
    """An object whose handler writes only once the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.failure: Exception | None = None


class GateHandler:
    """Saves a `Gate`, in either library."""

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Gate)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return False

    async def save(self, directory: Any, checkpointable: Gate) -> Any:
        async def write() -> None:
            await directory.await_creation()
            await to_thread.run_sync(checkpointable.open.wait, abandon_on_cancel=True)
            if checkpointable.failure is not None:
                raise checkpointable.failure

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        raise NotImplementedError

    async def metadata(self, directory: Any) -> None:
        return None


@pytest.fixture
def gated() -> Iterator[tuple[Any, Gate]]:
    context, gate = penstock_v1.Context(), Gate()
    context.checkpointables.registry = local_registry().add(GateHandler)
    yield context, gate
    gate.open.set()


def test_while_one_step_is_saved_the_default_policy_saves_no_other(gated: Any, tmp_path: Path) -> None:
    context, gate = gated
    with penstock_v1.training.Checkpointer(tmp_path, context=context) as checkpointer:
        saving = checkpointer.save_checkpointables_async(0, {"gate": gate})
        assert saving is not None
        assert checkpointer.is_saving_in_progress()
        assert not checkpointer.save(1, TREE)
        assert steps_in(tmp_path) == []
        gate.open.set()
        assert saving.result()
        assert checkpointer.save(2, TREE)
    assert steps_in(tmp_path) == [0, 2]


def test_steps_stay_until_the_one_that_replaces_them_is_durable(gated: Any, tmp_path: Path) -> None:
    context, gate = gated
    policy = penstock_v1.training.preservation_policies.LatestN(1)
    with penstock_v1.training.Checkpointer(
        tmp_path, context=context, preservation_policy=policy
    ) as checkpointer:
        checkpointer.save(0, TREE)
        checkpointer.save_checkpointables_async(1, {"gate": gate})
        assert [found.step for found in checkpointer.checkpoints] == [1]
        assert steps_in(tmp_path) == [0]
        gate.open.set()
        checkpointer.wait()
        assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("told", ["result", "wait", "close", "save"])
def test_a_failure_in_the_background_is_raised_once(gated: Any, tmp_path: Path, told: str) -> None:
    context, gate = gated
    policy = penstock_v1.training.preservation_policies.LatestN(1)
    checkpointer = penstock_v1.training.Checkpointer(tmp_path, context=context, preservation_policy=policy)
    checkpointer.save(0, TREE)
    gate.failure = OSError("the medium is gone")
    saving = checkpointer.save_checkpointables_async(1, {"gate": gate})
    assert saving is not None
    gate.open.set()
    tell = getattr(saving if told == "result" else checkpointer, told)
    arguments: dict[str, Any] = {"step": 2, "state": TREE, "force": True} if told == "save" else {}
    with pytest.raises(OSError, match="the medium is gone"):
        tell(**arguments)

    assert [found.step for found in checkpointer.checkpoints] == [0]
    assert steps_in(tmp_path) == [0]
    checkpointer.close()


def test_a_save_is_cancelled(gated: Any, tmp_path: Path) -> None:
    context, gate = gated
    with penstock_v1.training.Checkpointer(tmp_path, context=context) as checkpointer:
        checkpointer.save(0, TREE)
        checkpointer.save_checkpointables_async(1, {"gate": gate})
        checkpointer.cancel()
        assert [found.step for found in checkpointer.checkpoints] == [0]
        checkpointer.cancel(0)
        assert checkpointer.latest is None
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_being_saved_is_loaded_once_it_is_there(tmp_path: Path) -> None:
    with penstock_v1.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_async(0, {"w": jnp.ones((512, 512))})
        assert checkpointer.load()["w"].shape == (512, 512)


@pytest.mark.anyio
async def test_every_operation_of_training_can_be_awaited(tmp_path: Path) -> None:
    with penstock_v1.training.Checkpointer(tmp_path) as checkpointer:
        saving = checkpointer.save_async(0, TREE)
        assert saving is not None
        assert await saving
        assert (await checkpointer.load_async())["step"] == 0
        assert set(await checkpointer.load_checkpointables_async(0)) == {"state"}
        assert await checkpointer.delete_async(0)


def test_policies_of_penstock_are_accepted(tmp_path: Path) -> None:
    saved(
        penstock_v1,
        tmp_path,
        range(9),
        save_decision_policy=EverySteps(2),
        preservation_policy=KeepLast(2),
    )

    assert steps_in(tmp_path) == [6, 8]


def test_the_context_of_the_checkpointer_counts_unless_another_is_in_force(tmp_path: Path) -> None:
    old, new = penstock_v1.Context(), penstock_v1.Context()
    old.array.saving.use_zarr3, new.array.saving.use_zarr3 = False, True
    with penstock_v1.training.Checkpointer(tmp_path, context=old) as checkpointer:
        checkpointer.save(0, {"w": jnp.ones(4)})
        with new:
            checkpointer.save(1, {"w": jnp.ones(4)})
    zarr3 = ['"use_zarr3": true' in (tmp_path / str(n) / "state" / "_METADATA").read_text() for n in (0, 1)]

    assert zarr3 == [False, True]


def test_what_only_object_stores_have_is_refused() -> None:
    context = penstock_v1.Context()
    with pytest.raises(ConfigError, match="todelete_full_path"):
        context.deletion.gcs_deletion_options.todelete_full_path = "trash"


def test_a_crashed_save_is_removed_if_asked(tmp_path: Path) -> None:
    left = tmp_path / "3.orbax-checkpoint-tmp"
    left.mkdir(parents=True)
    for asked in (False, True):
        with penstock_v1.training.Checkpointer(tmp_path, cleanup_tmp_directories=asked) as checkpointer:
            assert checkpointer.latest is None
        assert left.exists() is not asked


def test_times_and_metrics_need_not_be_read(tmp_path: Path) -> None:
    training = penstock_v1.training
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, TREE, metrics={"loss": 1})
    with training.Checkpointer(tmp_path, lightweight_initialize=True) as checkpointer:
        latest = checkpointer.latest
        assert latest is not None
        assert (latest.step, latest.metrics, latest.time.year) == (0, None, 1)


def test_a_logger_hears_of_saves_and_loads(ocp: Any, tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []

    class Logger:
        def log_entry(self, entry: dict[str, Any]) -> None:
            heard.append((entry["event_type"], entry["step"]))

    with ocp.training.Checkpointer(tmp_path, logger=Logger()) as checkpointer:
        checkpointer.save(4, TREE)
        checkpointer.load()

    assert heard == [("save", 4), ("restore", 4)]


def test_steps_are_logged_without_a_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        saved(penstock_v1, tmp_path, [1])

    assert "orbax.step" in {vars(record)["penstock"]["event"] for record in caplog.records}


@pytest.mark.parametrize("name", ["pytree", "pytree_async"])
def test_older_names_warn(ocp: Any, tmp_path: Path, name: str) -> None:
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(DeprecationWarning, match="save"):
            found = getattr(checkpointer, f"save_{name}")(0, TREE)
        assert found if isinstance(found, bool) else found.result()
        with pytest.warns(DeprecationWarning, match="load"):
            assert checkpointer.load_pytree()["step"] == 0
        with pytest.warns(DeprecationWarning, match="metadata"):
            assert checkpointer.pytree_metadata().step == 0


def test_steps_of_metadata_are_printed() -> None:
    one = penstock_v1.training.CheckpointMetadata(3, Path("/x/3"), metadata=None, metrics={"a": 1})

    assert repr(one).endswith("step=3, metrics={'a': 1})")
    assert one.time.year == 1970


def test_a_policy_sees_all_that_a_context_says_of_processes(tmp_path: Path) -> None:
    seen = list[Any]()

    class Policy:
        def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
            seen.append(context.multiprocessing_options.barrier_sync_key_prefix)
            return False

    context = penstock_v1.Context()
    context.multiprocessing.barrier_sync_key_prefix = "a run"
    with penstock_v1.training.Checkpointer(
        tmp_path, context=context, save_decision_policy=Policy()
    ) as checkpointer:
        assert not checkpointer.should_save(1)

    assert seen == ["a run"]
