"""Real processes that save one tree together: two of them on asyncio, four on trio."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tests.processes.launcher import Job, run_job, run_once
from tests.processes.trees import host_leaves, values

import penstock.sync

CASES = (
    "saves_and_restores",
    "orbax_reads",
    "orbaxs_names_refuse_what_is_spread",
    "trees_that_differ_are_refused",
    "a_failure_ends_it_for_all",
    "a_cancellation_ends_it_for_all",
    "saves_in_opposite_order_do_not_cross",
    "calls_and_keys_stay_few",
    "the_budget_is_kept",
    "every_format_can_be_written",
    "steps_and_items",
    "saves_large_arrays",
    "reads_what_its_devices_hold",
    "what_is_replicated_is_divided",
    "one_is_stopped_and_wakes",
    "one_dies_in_the_middle",
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(118)]


@pytest.fixture(
    scope="module",
    params=[(2, "asyncio"), pytest.param((4, "trio"), marks=pytest.mark.slow)],
    ids=["two", "four"],
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Every case once, in one job: starting the processes is what takes long."""
    count, backend = request.param
    return run_once(tmp_path_factory, count, CASES, backend=backend)


def saved(job: Job) -> Path:
    job.results("saves_and_restores")
    return job.folder / "saves_and_restores" / "step_1"


def test_what_is_saved_together_is_restored_by_all(job: Job) -> None:
    for result in job.results("saves_and_restores"):
        assert result["differs"] == []
        assert result["text"] == "hello"


def test_every_process_writes_a_part_and_together_they_write_each_byte_once(job: Job) -> None:
    results = job.results("saves_and_restores")
    on_hosts = {"numpy": 48, "number": 8, "local": 12, "key": 8}
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(values())) + sum(on_hosts.values()) + 8 * 8
    assert sum(result["nbytes"] for result in results) == n_bytes
    assert all(result["nbytes"] > 0 for result in results)
    assert {result["n_leaves"] for result in results} == {len(jax.tree.leaves(values())) + 7}


def test_one_process_restores_it_without_a_target(
    job: Job, assert_same: Callable[[object, object], None]
) -> None:
    with penstock.sync.Checkpointer() as opened:
        found = opened.restore(saved(job))

    for name, want in {**values(), "numpy": host_leaves()["numpy"]}.items():
        assert_same(jax.tree.map(np.asarray, found[name]), jax.tree.map(np.asarray, want))


def test_orbax_reads_it_in_one_process(job: Job) -> None:
    path = saved(job)
    restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in ("rows", "both", "replicated")}
    found = ocp.PyTreeCheckpointer().restore(
        path,
        args=ocp.args.PyTreeRestore(
            dict.fromkeys(restore_args, 0), restore_args=restore_args, partial_restore=True
        ),
    )

    for name in restore_args:
        np.testing.assert_array_equal(found[name], values()[name])


def test_orbax_reads_it_in_all_processes(job: Job) -> None:
    assert job.results("orbax_reads") == [{"differs": []}] * job.count


def test_orbaxs_names_refuse_what_is_spread_in_each_process(job: Job) -> None:
    assert job.results("orbaxs_names_refuse_what_is_spread") == ["['both']"] * job.count


def test_each_process_has_data_files_of_its_own(job: Job) -> None:
    names = os.listdir(saved(job))
    assert {f"ocdbt.process_{rank}" for rank in range(job.count)} <= set(names)
    assert "_PENSTOCK_PARTS" not in names


@pytest.mark.parametrize(
    ("change", "leaf"),
    [("bytes", "['numpy']"), ("leaf", "['extra']"), ("type", "['number']"), ("spec", "['rows']")],
)
def test_trees_that_differ_are_refused_by_all_with_the_leaf(job: Job, change: str, leaf: str) -> None:
    for told in job.results("trees_that_differ_are_refused"):
        assert told[change]["who"] == [job.count - 1]
        (line,) = told[change]["what"]
        assert line.startswith(f"{leaf}: process 0 has ")


def test_a_failure_of_one_process_is_raised_by_all_and_says_whose_it_was(job: Job) -> None:
    results = job.results("a_failure_ends_it_for_all")
    for step in results[0]:
        who = int(step.split()[1])
        assert results[who][step][0] == "StorageError", step
        for rank, told in enumerate(results):
            if rank != who:
                assert told[step][:2] == ["PeerFailedError", [who]], (step, rank)
                assert told[step][2] in ("write", "commit", "agree"), (step, rank)


def test_a_cancellation_of_one_process_is_raised_by_all(job: Job) -> None:
    *others, own = job.results("a_cancellation_ends_it_for_all")
    assert own == "SaveCancelledError []"
    assert others == [f"PeerFailedError [{job.count - 1}]"] * (job.count - 1)


def test_saves_in_opposite_order_do_not_cross(job: Job) -> None:
    for differences in job.results("saves_in_opposite_order_do_not_cross"):
        assert differences == [[], [], [], []]


def test_calls_and_keys_stay_few(job: Job) -> None:
    for rank, result in enumerate(job.results("calls_and_keys_stay_few")):
        beats = 1  # one at once
        assert max(result["calls"]) <= (16 if rank == 0 else 12) + beats, result
        assert result["left"] <= 20


def test_the_budget_is_kept(job: Job) -> None:
    for result in job.results("the_budget_is_kept"):
        assert result["peak"] <= 2**20
        assert result["differs"] == []


def test_each_process_reads_no_more_than_its_devices_hold(job: Job) -> None:
    for result in job.results("reads_what_its_devices_hold"):
        check_bytes_read(result)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_of_another_number_read_no_more_either(job: Job, count: int, tmp_path: Path) -> None:
    job.results("saves_large_arrays")
    shutil.copytree(job.folder / "saves_large_arrays" / "step_1", tmp_path / "saved")
    for result in run_job(tmp_path, count, ["reads_what_its_devices_hold"]).results(
        "reads_what_its_devices_hold"
    ):
        # Four processes need half the rows of each chunk that two wrote of this array.
        check_bytes_read(result, ("both",) if count > job.count else ())


def check_bytes_read(result: Any, but: Sequence[str] = ()) -> None:
    for name, need in result["need"].items():
        read = result["read"][name] - result["documents"]
        assert read >= 0.99 * need, name
        if name not in but:
            assert read <= 1.15 * need, name


def test_every_format_can_be_written_and_overwritten(job: Job) -> None:
    for result in job.results("every_format_can_be_written"):
        assert set(result["differs"]) == set(result["there"])
        assert all(found == [] for found in result["differs"].values()), result


def test_steps_and_items(job: Job) -> None:
    for result in job.results("steps_and_items"):
        assert (result["steps"], result["latest"]) == (["3", "4"], 4)
        assert (result["differs"], result["items"]) == ([], [])


def test_what_is_replicated_is_divided(job: Job) -> None:
    results = job.results("what_is_replicated_is_divided")
    mean = results[0]["all"] / job.count
    for name in ("cut", "two", "whole"):
        assert sum(result["wrote"][name] for result in results) == results[0]["all"]

    for result in results:
        assert abs(result["wrote"]["cut"] - mean) <= mean / 10
    # Two replicas of the large one write half of it each, and they are of different processes.
    large = 64 * 1024 * 4
    assert max(result["wrote"]["two"] for result in results) < large
    assert max(result["wrote"]["whole"] for result in results) > large


def test_who_is_stopped_is_named_and_does_no_harm_when_it_wakes(job: Job) -> None:
    *others, own = job.results("one_is_stopped_and_wakes")
    for result in others:
        assert result["told"] == ["PeerSilentError", [job.count - 1], "write"]
    assert own["told"][:2] == ["PeerSilentError", [job.count - 1]]
    for result in (*others, own):
        assert result["there"] == ["step_1"]
        assert result["differs"] == []
        assert result["unknown"] == []


def test_who_is_killed_is_named_and_the_earlier_checkpoint_is_there(job: Job) -> None:
    for rank in range(job.count - 1):
        result = job.result("one_dies_in_the_middle", rank)
        assert result["told"] == ["PeerSilentError", [job.count - 1], "write"]
        assert result["differs"] == []

    assert sorted(os.listdir(job.folder / "one_dies_in_the_middle")) == ["step_1"]
