"""Real processes that save one tree together: two of them on asyncio, four on trio."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.processes.launcher import Job, run_job
from tests.processes.trees import host_leaves, values

import penstock.sync

pytestmark = [pytest.mark.process, pytest.mark.timeout(178)]


def test_what_is_saved_together_is_restored_by_all(job: Job) -> None:
    for result in job.results("saves_and_restores"):
        assert result["differs"] == []
        assert result["streamed"] == []
        assert result["text"] == "hello"


def test_every_process_writes_a_part_and_together_they_write_each_byte_once(job: Job) -> None:
    results = job.results("saves_and_restores")
    on_hosts = {"numpy": 48, "number": 8, "local": 12, "key": 8}
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(values())) + sum(on_hosts.values()) + 8 * 8
    assert sum(result["nbytes"] for result in results) == n_bytes
    assert all(result["nbytes"] > 0 for result in results)
    assert {result["n_leaves"] for result in results} == {len(jax.tree.leaves(values())) + 7}


def test_one_process_restores_a_joint_checkpoint_without_a_target(
    job: Job, assert_same: Callable[[object, object], None]
) -> None:
    with penstock.sync.Checkpointer() as opened:
        found = opened.restore(job.saved())

    for name, want in {**values(), "numpy": host_leaves()["numpy"]}.items():
        assert_same(jax.tree.map(np.asarray, found[name]), jax.tree.map(np.asarray, want))


def test_each_process_has_data_files_of_its_own(job: Job) -> None:
    names = os.listdir(job.saved())
    assert {f"ocdbt.process_{rank}" for rank in range(job.count)} <= set(names)
    assert not [name for name in names if name.startswith("_PENSTOCK_PARTS")]


@pytest.mark.parametrize(
    ("change", "leaf"),
    [
        ("bytes", "['numpy']"),
        ("leaf", "['extra']"),
        ("type", "['number']"),
        ("spec", "['rows']"),
        ("format", "option format"),
        ("metadata", "option custom_metadata"),
    ],
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


def test_calls_and_keys_stay_few_in_a_hundred_saves(job: Job) -> None:
    check_calls_and_keys(job)


@pytest.mark.slow
def test_calls_and_keys_are_no_more_from_eight_processes(tmp_path: Path) -> None:
    check_calls_and_keys(run_job(tmp_path, 8, ["calls_and_keys_stay_few"]))


def check_calls_and_keys(job: Job) -> None:
    for rank, result in enumerate(job.results("calls_and_keys_stay_few")):
        first, *others = result["calls"]
        first_beat, neighbours = 1, 1  # the first save asks how many processes share the memory
        most = (16 if rank == 0 else 13) + first_beat
        assert max(others) <= most, result
        assert first <= most + neighbours, result
        assert result["left"] <= 20


def test_the_budget_is_kept(job: Job) -> None:
    for result in job.results("the_budget_is_kept"):
        assert result["peak"] <= 2**20
        assert result["differs"] == []


def test_every_format_can_be_written_and_overwritten(job: Job) -> None:
    for result in job.results("every_format_can_be_written"):
        assert set(result["differs"]) == set(result["there"])
        assert all(found == [] for found in result["differs"].values()), result


def test_one_codec_is_chosen_for_all_parts_of_a_leaf(job: Job) -> None:
    *others, last = job.results("one_codec_is_chosen_for_all_parts_of_a_leaf")
    for result in (*others, last):
        assert result.pop("encoded 1") == ["all", "host", "own", "zeros"]
        assert result.pop("encoded 3") == ["all", "host", "own", "zeros"]
        assert all(found["differs"] == [] and found["intact"] for found in result.values()), result
    # What is encoded is not linked; of `noise` the last one's part is zeros now, and the others link theirs.
    for result in others:
        assert result["auto 3"]["kept"] == result["auto 2"]["kept"] > 0
    assert last["auto 3"]["kept"] < last["auto 2"]["kept"]


def test_safetensors_are_written_together_into_the_same_files(job: Job) -> None:
    results = job.results("safetensors_are_written_together")
    folder = job.folder / "safetensors_are_written_together"
    for result in results:
        assert result["there"] == ["folder", "one.safetensors", "several"]
        for name in result["there"]:
            assert (result[name]["differs"], result[name]["intact"]) == ([], True)
            assert result[name]["nbytes"] > 0
            assert sum(each[name]["nbytes"] for each in results) == result["wanted"]

    assert len(list((folder / "several").glob("*.safetensors"))) >= 4
    x = np.arange(64 * 2048, dtype=np.float32).reshape(64, 2048)
    for file in (folder / "one.safetensors", folder / "folder" / "model.safetensors"):
        found = load_file(file)
        for at, name in enumerate(("rows", "columns", "all", "both")):
            np.testing.assert_array_equal(found[name], x + at)


def test_what_safetensors_cannot_be_written_together_is_refused_or_ends_for_all(job: Job) -> None:
    *others, last = job.results("safetensors_are_written_together")
    assert last["failed"] == "StorageError"
    for result in (*others, last):
        assert "['own'].value: each process has it for itself" in result["own"]
    for result in others:
        assert result["failed"] == "PeerFailedError"


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
