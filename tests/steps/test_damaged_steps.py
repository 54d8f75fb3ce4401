"""Steps whose documents are damaged: no value out of them decides about a deletion."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock.orbax as ocp
import penstock.orbax.v1 as v1
from penstock.errors import ChecksumError, CorruptCheckpointError, MissingFileError
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax import CHECKPOINT_METADATA, COMMIT_MARK, INTEGRITY
from penstock.steps import (
    KeepAll,
    KeepAllOf,
    KeepAnyOf,
    KeepBest,
    KeepEverySeconds,
    KeepLast,
    KeepPolicy,
    KeepRecent,
    StepInfo,
)
from penstock.steps.keep_policies import Needs, steps_to_delete
from penstock.steps.step_directory import StepReader
from penstock.sync import CheckpointManager
from penstock.testing import FaultyStore

TIME: Needs = frozenset({"time"})
METRICS = "metrics/metrics"


def save(manager: CheckpointManager, step: int, loss: float) -> None:
    future = manager.save(step, {"a": np.arange(3)}, metrics={"loss": loss})
    assert future is not None
    future.result()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps, of which the first is the better one."""
    with CheckpointManager(tmp_path) as manager:
        save(manager, 1, 1.0)
        save(manager, 2, 2.0)

    return tmp_path


def change(path: Path, before: bytes, after: bytes) -> None:
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after, 1))


def of_others(step: Path) -> Path:
    """Remove every digest, as Orbax writes none; return the step."""
    for name in (INTEGRITY, COMMIT_MARK):
        (step / name).unlink()

    return step


Damage = Callable[[Path], object]
DAMAGES_OF_TIME: dict[str, Damage] = {
    "a digit": lambda step: change(
        step / CHECKPOINT_METADATA, b'"commit_timestamp_nsecs": 1', b'"commit_timestamp_nsecs": 3'
    ),
    "a name": lambda step: change(step / CHECKPOINT_METADATA, b'"commit_timestamp', b'"commit_timestamq'),
    "lost": lambda step: (step / CHECKPOINT_METADATA).unlink(),
    "cut": lambda step: (step / CHECKPOINT_METADATA).write_bytes(b""),
    "no record": lambda step: (step / INTEGRITY).unlink(),
    "of others, lost": lambda step: (of_others(step) / CHECKPOINT_METADATA).unlink(),
    "of others, cut": lambda step: (of_others(step) / CHECKPOINT_METADATA).write_bytes(b"{"),
    "of others, empty": lambda step: (of_others(step) / CHECKPOINT_METADATA).write_bytes(b""),
}
DAMAGES_OF_METRICS: dict[str, Damage] = {
    "a digit": lambda step: change(step / METRICS, b"1.0", b"9.0"),
    "a name": lambda step: change(step / METRICS, b"loss", b"moss"),
    "lost": lambda step: (step / METRICS).unlink(),
    "no record": lambda step: (step / INTEGRITY).unlink(),
    "of others, cut": lambda step: (of_others(step) / METRICS).write_bytes(b"{"),
}


@pytest.mark.parametrize("damage", DAMAGES_OF_TIME.values(), ids=DAMAGES_OF_TIME)
def test_a_damaged_time_deletes_no_step(run: Path, damage: Damage) -> None:
    """The policy keeps nothing: a step stays only if its time is not known, or if it is the last one."""
    damage(run / "1")
    with CheckpointManager(run, keep=KeepRecent(-1e9)) as manager:
        save(manager, 3, 3.0)
        manager.wait()
        assert list(manager.all_steps()) == [1, 3]


@pytest.mark.parametrize("damage", DAMAGES_OF_METRICS.values(), ids=DAMAGES_OF_METRICS)
def test_damaged_metrics_delete_no_step(run: Path, damage: Damage) -> None:
    damage(run / "1")
    with CheckpointManager(run, keep=KeepBest(1, "loss", without_metric=False)) as manager:
        save(manager, 3, 3.0)
        manager.wait()
        assert list(manager.all_steps()) == [1, 2, 3]


POLICIES: list[KeepPolicy] = [
    KeepRecent(5.0),
    KeepEverySeconds(10.0),
    KeepAllOf((KeepAll(), KeepRecent(5.0))),
    KeepAnyOf((KeepRecent(5.0), KeepLast(1))),
    KeepBest(1, "loss", without_metric=False),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_what_is_not_known_of_a_step_keeps_it(policy: KeepPolicy) -> None:
    steps = [StepInfo(1, 0.0), StepInfo(2, is_readable=False), StepInfo(3, 1.0), StepInfo(4, 100.0)]

    gone = steps_to_delete(policy, steps, 100.0)

    assert 2 not in gone
    assert gone == steps_to_delete(policy, [info for info in steps if info.is_readable], 100.0)
    assert 3 in gone


class TestReadingTheTime:
    def test_two_files_are_read_of_a_step(self, run: Path) -> None:
        store = FaultyStore(LocalStore())
        info = StepReader(store).info(str(run / "1"), 1, TIME)
        recorded = json.loads((run / "1" / CHECKPOINT_METADATA).read_text())["commit_timestamp_nsecs"]
        assert info == StepInfo(1, recorded / 1e9)
        assert [operation.name for operation in store.operations] == ["read_files"]

    @pytest.mark.parametrize(
        ("damage", "error"),
        [("a digit", ChecksumError), ("a name", ChecksumError), ("lost", MissingFileError),
         ("no record", MissingFileError), ("of others, cut", CorruptCheckpointError)],
    )  # fmt: skip
    def test_damage_is_found(self, run: Path, damage: str, error: type[Exception]) -> None:
        DAMAGES_OF_TIME[damage](run / "1")
        with pytest.raises(error):
            StepReader(LocalStore()).info(str(run / "1"), 1, TIME)

    def test_a_document_that_was_rewritten_by_right_is_read(self, run: Path) -> None:
        file = run / "1" / CHECKPOINT_METADATA
        before = StepReader(LocalStore()).info(str(run / "1"), 1, TIME)
        document: Any = json.loads(file.read_text())
        del document["item_handlers"]["metrics"]
        file.write_text(json.dumps(document))
        assert StepReader(LocalStore()).info(str(run / "1"), 1, TIME) == before

    def test_what_others_wrote_is_read_as_it_is(self, run: Path) -> None:
        of_others(run / "1")
        DAMAGES_OF_TIME["a digit"](run / "1")
        assert StepReader(LocalStore()).info(str(run / "1"), 1, TIME).is_readable

    def test_a_time_that_was_never_recorded_is_not_known(self, run: Path) -> None:
        of_others(run / "1")
        (run / "1" / CHECKPOINT_METADATA).write_text("{}")
        assert not StepReader(LocalStore()).info(str(run / "1"), 1, TIME).is_readable


def test_the_face_deletes_nothing_of_which_it_did_not_read_the_time(run: Path) -> None:
    """Where steps are only listed, as `lightweight_initialize` asks for."""
    for step in (1, 2):
        os.utime(run / str(step), (0, 0))
    for policy, left in ((KeepRecent(-1e9), [1, 2, 3]), (KeepLast(2), [2, 3])):
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, lightweight_initialize=True)
        with ocp.CheckpointManager(run, options=options) as manager:
            manager.save(3, args=ocp.args.StandardSave({"a": np.arange(3)}), force=True)
            manager.wait_until_finished()
            assert manager.all_steps() == left
            manager.delete(3)


@pytest.mark.parametrize("damage", [*DAMAGES_OF_TIME.values()][:5], ids=[*DAMAGES_OF_TIME][:5])
def test_a_damaged_time_deletes_no_step_of_the_face(run: Path, damage: Damage) -> None:
    damage(run / "1")
    policy = ocp.checkpoint_managers.LatestDuration(datetime.timedelta(seconds=-1e6))
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    with ocp.CheckpointManager(run, options=options) as manager:
        assert manager.all_steps() == [1, 2]
        manager.save(3, args=ocp.args.StandardSave({"a": np.arange(3)}))
        manager.wait_until_finished()

    assert sorted(name for name in os.listdir(run) if name.isdigit()) == ["1"]


@pytest.mark.parametrize("damage", DAMAGES_OF_METRICS.values(), ids=DAMAGES_OF_METRICS)
def test_damaged_metrics_delete_no_step_of_the_face(run: Path, damage: Damage) -> None:
    damage(run / "1")
    policy = ocp.checkpoint_managers.BestN(
        get_metric_fn=lambda metrics: metrics["loss"],
        reverse=True,
        n=1,
        keep_checkpoints_without_metrics=False,
    )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policy, best_fn=lambda metrics: metrics["loss"]
    )
    with ocp.CheckpointManager(run, options=options) as manager:
        manager.save(3, args=ocp.args.StandardSave({"a": np.arange(3)}), metrics={"loss": 3.0})
        manager.wait_until_finished()

    assert sorted(name for name in os.listdir(run) if name.isdigit()) == ["1", "2"]


@pytest.mark.parametrize("damage", ["a digit", "lost", "of others, lost"])
def test_a_damaged_time_deletes_no_step_of_the_newer_face(run: Path, damage: str) -> None:
    DAMAGES_OF_TIME[damage](run / "1")
    policy = v1.training.preservation_policies.LatestDuration(datetime.timedelta(seconds=-1e6))
    with v1.training.Checkpointer(run, preservation_policy=policy) as checkpointer:
        checkpointer.save(3, {"a": np.arange(3)})

    assert sorted(name for name in os.listdir(run) if name.isdigit()) == ["1"]
