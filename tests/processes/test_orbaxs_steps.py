"""Steps and parts under Orbax's names, in a job of several processes, on a disk and in a bucket."""

from __future__ import annotations

import pytest
from tests.processes.launcher import Job

pytestmark = [pytest.mark.process, pytest.mark.timeout(178)]


def test_a_manager_saves_steps_in_all_processes(orbax_job: Job) -> None:
    for result in orbax_job.results("orbaxs_manager_saves_steps"):
        assert result["saved"] == [True, False, True, True]
        assert (result["steps"], result["best"]) == ([0, 4], 0)
        assert result["there"] == ["0", "4", "metadata"]
        assert result["after deleting"] == [0]
        assert result["again"] == [0]
        assert (result["root"], result["metrics"]) == ({"run": 1}, {"score": 3.0})
        assert (result["differs"], result["by Orbax"], result["Orbax's"]) == ([], [], [0])
        assert result["preempted"] is False


def test_a_manager_links_what_did_not_change_to_the_step_before(orbax_job: Job) -> None:
    results = orbax_job.results("orbaxs_manager_links_steps")
    for result in results:
        assert result["linked"][0] == 3  # the same file in all steps
        assert result["differs"] == []
        assert result["after damage"][0] == 1  # all written anew

    new, kept = 64 * 64 * 4, 8 * 64 * 64 * 4
    assert sum(result["linked"][1] for result in results) < 1.2 * new
    assert sum(result["after damage"][1] for result in results) >= new + kept


def test_process_0_decides_for_all(orbax_job: Job) -> None:
    for rank, result in enumerate(orbax_job.results("orbaxs_manager_decides_once")):
        assert result["saved"] == [True, False, True, False, True]
        assert result["steps"] == [1, 5]
        assert result["cannot say"] == ("LookupError" if rank == 0 else "PeerFailedError")
        told, steps = result["policy"]
        assert told == [*(["LookupError"] if rank == 0 else ["PeerFailedError"])]
        assert steps == [1, 2]
        assert (result["differs"], result["left"], result["then"]) == ("['own']", [], True)


def test_an_emergency_manager_keeps_a_part_in_the_directory_of_each_process(orbax_job: Job) -> None:
    for result in orbax_job.results("orbaxs_emergency_manager_saves"):
        assert result["saved"] == [0, 2, 4, 6, 8, 10]
        assert (result["steps"], result["differs"]) == ([0, 6, 8, 10], [])
        assert (result["local"], result["persistent"]) == (["10", "8"], ["0", "6"])
        assert result["resumed"] == [10, []]
        assert result["after a loss"] == [10, []]  # resuming has brought it to the persistent directory
        assert result["by Orbax"] == []


def test_a_replicator_manager_keeps_a_part_in_the_directory_of_each_process(orbax_job: Job) -> None:
    for result in orbax_job.results("orbaxs_replicator_manager_saves"):
        assert (result["saved"], result["steps"], result["there"]) == ([0, 2], [0, 2], ["0", "2"])
        assert result["resumed"] == [2, []]


def test_v1_saves_in_all_processes(orbax_job: Job) -> None:
    for rank, result in enumerate(orbax_job.results("orbaxs_v1_saves")):
        assert (result["tree"], result["items"]) == ([], [{"step": 7}])
        assert (result["steps"], result["saved"], result["latest"]) == ([True, True], True, 3)
        assert (result["loaded"], result["by Orbax"]) == ([], [])
        assert result["differs"].startswith("['rank']: process 0 has ")
        assert result["own"] == rank
        assert result["there"] == ["items", "run", "tree"]


def test_all_processes_save_to_a_bucket(orbax_job: Job) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    for rank, result in enumerate(orbax_job.results("orbaxs_names_save_to_a_bucket")):
        assert (result["sync"], result["standard"], result["all"], result["left"]) == ([], [], [], [])
        assert (result["custom"], result["own"]) == ({"a": 1}, rank)
        assert result["differs"][0] == "PlansDifferError"
        assert "['x']: process 0 has " in result["differs"][1]
        for kind, words in result["fails"]:
            assert kind == ("ValueError" if rank == 0 else "PeerFailedError")
            assert "Unsupported type: <class 'object'> for key: ('x',)." in words

        if orbax_job.count > 2:
            kind, words = result["some"]
            assert kind == ("ConfigError" if rank < 2 else "InactiveProcessError")
            assert "active_processes" in words


def test_managers_keep_steps_in_a_bucket(orbax_job: Job) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    for result in orbax_job.results("orbaxs_managers_save_to_a_bucket"):
        assert (result["steps"], result["best"], result["again"]) == ([1, 3], 1, [1])
        assert (result["state"], result["extra"], result["root"]) == ([], {"a": 1}, {"run": 1})
        assert (result["newer"], result["loaded"], result["left"]) == ([2], [{"a": 2}], [])
        assert result["items"][0] == "PlansDifferError"
        assert "['rank']: process 0 has " in result["items"][1]


def test_v1_saves_a_tree_in_parts(orbax_job: Job) -> None:
    for result in orbax_job.results("orbaxs_parts_are_put_together"):
        assert result["refused"] == [
            "PartialSaveReplacementError",
            "PlansDifferError",
            "FileExistsError",
            "FileExistsError",
            "FileNotFoundError",
        ]
        assert (result["differs"], result["by Orbax"]) == ([], [])
        assert result["custom"] == {"a": 1, "b": 2}
        assert result["there"] == ["tree"]


def test_a_part_that_one_process_cannot_read_is_told_to_all(orbax_job: Job) -> None:
    told = f"process {orbax_job.count - 1}: ['rows']"
    expected = [*[told] * (orbax_job.count - 1), "['rows'] is damaged"]
    results = orbax_job.results("a_part_is_damaged_for_one_process")
    assert results == [[said, ["tree.partial_save"]] for said in expected]
