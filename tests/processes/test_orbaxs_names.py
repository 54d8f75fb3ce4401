"""`penstock.orbax` in a job of several processes."""

from __future__ import annotations

import pytest
from tests.processes.launcher import Job

pytestmark = [pytest.mark.process, pytest.mark.timeout(178)]


def test_all_processes_save_one_tree_together(job: Job) -> None:
    for result in job.results("orbaxs_names_save_together"):
        there, custom = result.pop("there"), result.pop("custom")
        assert there == ["async", "async 2", "standard", "sync"]
        assert custom == {"a": 1}
        assert set(result) == {
            "sync",
            "standard",
            "async",
            *[f"{name}, by Orbax" for name in ("standard", "async", "async 2")],
        }
        assert all(found == [] for found in result.values()), result


def test_what_they_cannot_do_is_refused_in_each_process(job: Job) -> None:
    for result in job.results("orbaxs_names_refuse_what_they_cannot"):
        assert "process 0 publishes" in result["told"]["primary"]
        assert "permissions of the job" in result["told"]["mode"]
        assert "by a rename" in result["told"]["in place"]
        assert result["there"] == []


def test_trees_that_differ_are_told_in_each_process(job: Job) -> None:
    for result in job.results("orbaxs_names_tell_of_a_failure"):
        assert result["told"].startswith("['x']: process 0 has ")
        assert result["there"] == []


def test_handlers_that_are_called_directly_write_a_part_each_and_are_merged(job: Job) -> None:
    for rank, result in enumerate(job.results("handlers_are_called_directly")):
        place, there = result.pop("place"), result.pop("there")
        assert there == [f"ocdbt.process_{index}" for index in range(job.count)]
        assert place.strip("/") == f"ocdbt.process_{rank}"
        assert len(result) == 2
        assert all(found == [] for found in result.values()), result


def test_the_primary_process_records_shardings_and_where_each_is_primary_each_saves(job: Job) -> None:
    for rank, result in enumerate(job.results("each_process_is_primary")):
        assert result["recorded"] == {"0": rank == 0, "1": rank == 1, "None": True}
        assert result["own"] == [rank, []]
