"""Reading the metrics of many steps: few files for each, and every byte compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.errors import ChecksumError, CorruptCheckpointError, MissingFileError
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax import CHECKPOINT_METADATA, COMMIT_MARK, INTEGRITY
from penstock.steps.step_directory import StepReader
from penstock.sync import CheckpointManager
from penstock.testing import FaultyStore, MemoryStore

METRICS = "metrics/metrics"
NAME = METRICS.encode()


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Step 1 has metrics, step 2 has none."""
    with CheckpointManager(tmp_path) as manager:
        for step, metrics in ((1, {"loss": 0.5}), (2, None)):
            future = manager.save(step, {"a": 1}, metrics=metrics)
            assert future is not None
            future.result()

    return tmp_path


def change(path: Path, before: bytes, after: bytes) -> None:
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after))


def test_two_files_of_a_step_with_metrics_are_read_and_three_of_one_without(steps: Path) -> None:
    store = FaultyStore(LocalStore())
    reader = StepReader(store)
    assert reader.metrics(str(steps / "1")) == {"loss": 0.5}
    assert [operation.name for operation in store.operations] == ["read_files"]
    assert reader.metrics(str(steps / "2")) is None
    assert reader.metrics(str(steps / "3")) is None
    assert {operation.name for operation in store.operations} == {"read_files"}
    assert len(store.operations) == 5


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda step: change(step / METRICS, b"0.5", b"0.4"), ChecksumError),
        (lambda step: (step / METRICS).unlink(), MissingFileError),
        (lambda step: shutil.rmtree(step / "metrics"), MissingFileError),
        (lambda step: (step / INTEGRITY).unlink(), MissingFileError),
        (lambda step: change(step / INTEGRITY, NAME, b"netrics/metrics"), ChecksumError),
        (lambda step: (step / INTEGRITY).write_bytes(b""), CorruptCheckpointError),
    ],
    ids=["metrics", "no metrics", "no folder", "no record", "a name in the record", "an empty record"],
)
def test_damage_is_found(steps: Path, damage: Callable[[Path], object], error: type[Exception]) -> None:
    damage(steps / "1")
    with pytest.raises(error):
        StepReader(LocalStore()).metrics(str(steps / "1"))


def test_damage_of_a_step_without_metrics_is_found(steps: Path) -> None:
    change(steps / "2" / INTEGRITY, b"_METADATA", b"_METADATE")
    with pytest.raises(ChecksumError):
        StepReader(LocalStore()).metrics(str(steps / "2"))


def test_metrics_that_were_deleted_by_right_are_none(steps: Path) -> None:
    file = steps / "1" / CHECKPOINT_METADATA
    document = json.loads(file.read_text())
    del document["item_handlers"]["metrics"]
    file.write_text(json.dumps(document))
    shutil.rmtree(steps / "1" / "metrics")
    assert StepReader(LocalStore()).metrics(str(steps / "1")) is None


def test_what_others_wrote_is_read_as_it_is(steps: Path) -> None:
    for name in (INTEGRITY, COMMIT_MARK):
        (steps / "1" / name).unlink()

    change(steps / "1" / METRICS, b"0.5", b"0.4")
    assert StepReader(LocalStore()).metrics(str(steps / "1")) == {"loss": 0.4}


def test_a_store_that_reads_one_by_one(tmp_path: Path) -> None:
    store = MemoryStore()
    store.make_directory("/run")
    with penstock.sync.CheckpointManager("/run", store=store) as manager:
        future = manager.save(1, {"a": 1}, metrics={"loss": 0.5})
        assert future is not None
        future.result()

    assert StepReader(store).metrics("/run/1") == {"loss": 0.5}
    assert StepReader(store).metrics("/run/2") is None
