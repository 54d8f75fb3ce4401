"""What each process has for itself: saved once for each, and given back to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from tests.processes.launcher import Job
from tests.processes.own_cases import FORMATS, own

import penstock.sync

pytestmark = [pytest.mark.process, pytest.mark.timeout(178)]


def saved(job: Job, name: str = "plain") -> Path:
    job.results("each_keeps_its_own")
    return job.folder / "each_keeps_its_own" / name


def test_each_process_gets_its_own_values_back(job: Job) -> None:
    names = (*FORMATS, *[f"{name}, unknown" for name in FORMATS], "items")
    assert job.results("each_keeps_its_own") == [{name: [] for name in names}] * job.count


@pytest.mark.parametrize("name", FORMATS)
def test_one_process_reads_the_values_of_all(job: Job, name: str) -> None:
    with penstock.sync.Checkpointer() as opened:
        found = opened.restore(saved(job, name))["iterator"]
        described = opened.metadata(saved(job, name)).tree["iterator"]
        assert opened.verify(saved(job, name)).intact

    assert set(found) == set(described) == {f"process_{rank}-of-{job.count}" for rank in range(job.count)}
    for rank in range(job.count):
        value, wanted = found[f"process_{rank}-of-{job.count}"], own(rank)
        assert (value["shard"], value["position"]) == (wanted["shard"], wanted["position"])
        assert value["pair"] == (wanted["pair"] if name == "tuples" else list(wanted["pair"]))
        np.testing.assert_array_equal(value["buffer"], wanted["buffer"])
        assert f"only in {rank}" in value


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_orbax_reads_the_values_of_all(job: Job) -> None:
    path = saved(job)
    values = {f"process_{rank}-of-{job.count}": {"buffer": 0, "position": 0} for rank in range(job.count)}
    arrays = dict.fromkeys(("buffer", "position"), ocp.RestoreArgs(restore_type=np.ndarray))
    found = ocp.PyTreeCheckpointer().restore(
        path,
        args=ocp.args.PyTreeRestore(
            {"iterator": values},
            restore_args={"iterator": dict.fromkeys(values, arrays)},
            partial_restore=True,
        ),
    )

    for rank in range(job.count):
        buffer = found["iterator"][f"process_{rank}-of-{job.count}"]["buffer"]
        np.testing.assert_array_equal(buffer, own(rank)["buffer"])


def test_what_each_process_has_can_be_converted(job: Job, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli", "convert", str(saved(job)), str(tmp_path / "x")]
    subprocess.run([*command, "--codec", "zstd"], check=True, capture_output=True)
    with penstock.sync.Checkpointer() as opened:
        found = opened.restore(tmp_path / "x")["iterator"]

    assert found[f"process_1-of-{job.count}"]["position"] == 101


def test_handlers_with_files_of_their_own_write_what_their_process_has(job: Job) -> None:
    results = job.results("handlers_write_files_of_their_own")
    own = [f"own.process_{rank}-of-{job.count}.note" for rank in range(job.count)]
    for rank, result in enumerate(results):
        assert result["called"] == [own[rank], *(["shared.0", "shared.1"] if rank == 0 else [])]
        assert result["differs"] == []
        assert result["bare"] == [f"by {other}" for other in range(job.count)]
        assert result["all"] == [f"{name}.note" for name in (*own, "shared.0", "shared.1")]


def test_a_handler_that_fails_ends_the_save_for_all_with_the_leaf(job: Job) -> None:
    *others, last = job.results("handlers_write_files_of_their_own")
    assert last["failed"] == ["here", "['own'].value['note']"]
    for result in others:
        assert result["failed"] == [[job.count - 1], "['own'].value['note']"]


def test_what_is_of_one_process_is_checked(job: Job) -> None:
    for rank, result in enumerate(job.results("what_is_of_one_process_is_checked")):
        told = result["told"]
        assert "iterator: process 0 has a PerProcess, " in told["unmarked"]
        assert "['a']" in told["spread"]
        assert "has shards on other processes" in told["spread"]
        assert f"['iterator']: saved by {job.count + 1} processes" in told["number"]
        assert result["divided"] == list(range(job.count + 1))[rank :: job.count]
        assert result["there"] == ["more"]
