"""What managers tell their loggers, and stores of documents in other processes: on both libraries."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint
import pytest

import penstock.orbax
from penstock.orbax import logging

both = pytest.mark.parametrize("ocp", [penstock.orbax, orbax.checkpoint], ids=["penstock", "orbax"])
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")


def _recorder(ocp: Any) -> Any:
    class Recorder(ocp.logging.AbstractLogger):  # type: ignore[misc]  # of either library
        def __init__(self) -> None:
            self.entries: list[Any] = []

        def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
            self.entries.append(msg)

    return Recorder()


@both
def test_a_logger_hears_of_saves_and_restores(tmp_path: Path, ocp: Any) -> None:
    first, second = _recorder(ocp), _recorder(ocp)
    logger = ocp.logging.CompositeLogger(first, second, "no logger")
    with ocp.CheckpointManager(tmp_path / "run", logger=logger) as manager:
        manager.save(3, args=ocp.args.StandardSave({"a": np.arange(3)}))
        manager.wait_until_finished()
        manager.restore(3)

    saved, restored = first.entries
    assert [saved["event_type"], restored["event_type"]] == ["save", "restore"]
    assert [saved["step"], restored["step"]] == [3, 3]
    assert restored["directory"] == saved["directory"] == str(tmp_path / "run")
    assert restored["checkpoint_manager_duration_secs"] >= restored["checkpointer_duration_secs"] > 0
    parts = ("wait_for_prev", "get_old_steps", "checkpointer_blocking", "checkpoint_manager_blocking")
    assert all(saved[f"{part}_start_time"] > 0 <= saved[f"{part}_duration_secs"] for part in parts)
    whole = saved["checkpoint_manager_blocking_duration_secs"]
    assert sum(saved[f"{part}_duration_secs"] for part in parts[:-1]) <= whole
    assert set(saved) == set(vars(ocp.logging.step_statistics.SaveStepStatistics()))
    assert set(restored) == set(vars(ocp.logging.step_statistics.RestoreStepStatistics()))
    assert second.entries == first.entries


@both
def test_a_store_of_documents_can_be_pickled(tmp_path: Path, ocp: Any) -> None:
    store = ocp.metadata.metadata_store(enable_write=False, blocking_write=True)
    (tmp_path / "document").write_text('{"a": 1}')

    copied = pickle.loads(pickle.dumps(store))

    assert copied.read(tmp_path / "document") == {"a": 1}
    assert copied.is_blocking_writer()


def test_a_store_that_writes_can_be_pickled_too(tmp_path: Path) -> None:
    store = pickle.loads(pickle.dumps(penstock.orbax.metadata.metadata_store(enable_write=True)))

    store.write(tmp_path / "document", {"a": 1})
    store.update(tmp_path / "document", b=2)

    assert store.read(tmp_path / "document") == {"a": 1, "b": 2}
    assert not store.is_blocking_writer()


@both
@pytest.mark.parametrize("call", ["write", "update"])
def test_a_document_has_a_directory(tmp_path: Path, monkeypatch: Any, ocp: Any, call: str) -> None:
    monkeypatch.chdir(tmp_path)
    store = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)

    with pytest.raises(ValueError, match="Metadata parent name not set"):
        store.write("document", {"a": 1}) if call == "write" else store.update("document", a=1)
    with pytest.raises(OSError, match="No such file") as absent:
        store.write(tmp_path / "nowhere" / "document", {"a": 1})
    assert absent.value.errno == errno.ENOENT

    assert not list(tmp_path.iterdir())
    assert store.read("document") is None


@both
def test_a_store_that_only_reads_writes_nothing(tmp_path: Path, ocp: Any) -> None:
    store = ocp.metadata.metadata_store(enable_write=False, blocking_write=True)

    store.write(tmp_path / "document", {"a": 1})
    store.update(tmp_path / "document", a=1)

    assert not list(tmp_path.iterdir())


class Log:
    """What a client of Google Cloud has for a log."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: list[tuple[Any, str]] = []

    def log_struct(self, entry: Any, severity: str) -> None:
        self.entries.append((entry, severity))


class Client:
    def __init__(self) -> None:
        self.logs: list[Log] = []

    def logger(self, name: str) -> Log:
        self.logs.append(Log(name))
        return self.logs[0]


def test_a_cloud_logger_writes_entries_by_its_client() -> None:
    client = Client()
    options = logging.CloudLoggerOptions(job_name="job", logger_name="steps", client=client)
    logger = logging.CloudLogger(options=options)
    logger.log_entry({"step": 1}, severity="ERROR")
    logger.log_entry({"step": 2}, severity="odd")
    assert client.logs[0].name == "steps"
    assert client.logs[0].entries == [
        ({"step": 1, "job_name": "job"}, "ERROR"),
        ({"step": 2, "job_name": "job"}, "INFO"),
    ]


def test_a_cloud_logger_says_what_it_needs() -> None:
    with pytest.raises(ImportError, match="google-cloud-logging"):
        logging.CloudLogger()
