"""Three real processes: of which some save without the others, or which have a disk each."""

from __future__ import annotations

import pytest
from tests.processes.launcher import Job, run_once

CASES = (
    "two_groups_save_at_the_same_time",
    "who_takes_no_part_is_refused",
    "one_process_takes_no_arrays_of_others",
    "orbaxs_names_save_from_some",
    "an_automatic_limit_is_shared",
    "each_saves_to_its_own_disk",
    "tiers_on_own_disks_come_to_one_root",
    "safetensors_have_no_parts",
    "what_is_on_another_disk_is_named",
    "a_failure_on_one_disk_ends_it_for_all",
    "steps_are_those_that_all_disks_have",
    "a_preemption_is_reached_by_all_at_the_same_step",
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(178)]


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Three processes."""
    return run_once(tmp_path_factory, 3, CASES)


def test_two_groups_save_at_the_same_time_without_waiting_for_each_other(three: Job) -> None:
    for result in three.results("two_groups_save_at_the_same_time"):
        assert result["differs"] == [[], []]
        assert result["latest"] == 1


def test_who_takes_no_part_is_refused_and_reads(three: Job) -> None:
    outside, *others = three.results("who_takes_no_part_is_refused")
    assert outside["told"]["save"].startswith("process 0 takes no part: job.active_processes are 1, 2.")
    assert outside["told"]["everywhere"].startswith("InactiveProcessError")
    for result in others:
        assert result["told"]["everywhere"].startswith("InvalidLeafError")
        assert "['a']['b']" in result["told"]["everywhere"]
        assert "shards on process 0, and only 1, 2 take part" in result["told"]["everywhere"]

    for result in (outside, *others):
        assert result["there"] == ["step_1"]
        assert result["read"]


def test_one_process_alone_takes_no_arrays_of_others(three: Job) -> None:
    told = three.results("one_process_takes_no_arrays_of_others")[2]
    assert "['a']" in told
    assert "shards on other processes" in told


def test_orbaxs_names_save_from_some_processes(three: Job) -> None:
    outside, *others = three.results("orbaxs_names_save_from_some")
    assert outside["told"].startswith("process 0 takes no part")
    assert [result["told"] for result in others] == ["True [2]"] * 2
    assert outside["there"] == ["run", "step"]


def test_processes_of_one_host_share_an_automatic_limit(three: Job) -> None:
    for result in three.results("an_automatic_limit_is_shared"):
        assert result["sharers"] == three.count
        assert result["whole"] <= max(result["alone"] / 2, 64 * 2**20)


def test_each_saves_what_it_holds_to_its_own_disk(three: Job) -> None:
    results = three.results("each_saves_to_its_own_disk")
    for result in results:
        assert all(found == [] for found in result["differs"].values()), result["differs"]
        assert result["wrote"] >= result["distinct"]  # beside what each holds whole
        assert result["wrote"] < result["distinct"] + 400
        assert result["linked"] < result["wrote"] / 4
        assert result["shared"] < result["wrote"]  # what several hold is written once
        assert {"plain", "items"} <= set(result["there"])


def test_tiers_on_own_disks_come_to_one_root(three: Job) -> None:
    for result in three.results("tiers_on_own_disks_come_to_one_root"):
        assert all(found == [] for found in result["differs"].values()), result["differs"]


def test_safetensors_are_refused_before_a_byte_is_written(three: Job) -> None:
    for result in three.results("safetensors_have_no_parts"):
        (told,) = result["told"]
        assert "is on a disk of this process alone, and this format has no parts" in told
        assert result["there"] == []


def test_a_target_that_needs_another_disk_is_refused_with_the_leaf(three: Job) -> None:
    for rank, result in enumerate(three.results("what_is_on_another_disk_is_named")):
        elsewhere = ["['a']['b']", rank, [0, 1, 2]]
        assert result["told"] == [elsewhere if rank != 1 else None, elsewhere]
        assert result["differs"] == []


def test_a_failure_on_one_disk_ends_the_save_for_all(three: Job) -> None:
    for rank, told in enumerate(three.results("a_failure_on_one_disk_ends_it_for_all")):
        for name, what in told.items():
            who = int(name.split()[0])
            assert what == ("own" if who == rank else [who]), (rank, name)


def test_steps_are_those_that_all_disks_have(three: Job) -> None:
    for result in three.results("steps_are_those_that_all_disks_have"):
        assert (result["before"], result["latest"]) == (["2", "3", "4"], 3)
        assert result["there"] == ["2", "3"]
        assert result["differs"] == [[], []]


def test_a_preemption_is_reached_by_all_at_the_same_step(three: Job) -> None:
    steps = three.results("a_preemption_is_reached_by_all_at_the_same_step")
    assert steps[0] is not None
    assert steps == [steps[0]] * three.count
