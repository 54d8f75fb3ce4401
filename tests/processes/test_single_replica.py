"""One replica reads, and the others receive what it read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes.launcher import Job, run_job

pytestmark = [pytest.mark.process, pytest.mark.timeout(178)]


def test_one_replica_reads_and_all_have_it_bit_for_bit(job: Job) -> None:
    for rank, result in enumerate(job.results("one_replica_reads")):
        for axis in ("host", "device", "none"):
            assert (result[axis]["differs"], result[axis]["alike"]) == ([], []), axis
            everything = axis != "host" or rank == 0
            assert (result[axis]["read"] >= result["shared"]) is everything, axis

        # An eighth of it is what a process does not share, and what it reads of the documents.
        assert result["host"]["read"] <= (1.15 if rank == 0 else 0.15) * result["shared"]
        assert result["peak"] <= 4 * 2**20


def test_orbaxs_handler_has_one_replica_read(job: Job) -> None:
    for rank, result in enumerate(job.results("orbaxs_handler_reads_one_replica")):
        assert result["differs"] == []
        assert (result["read"] >= result["shared"]) is (rank == 0)


def test_two_restores_at_once_take_turns(job: Job) -> None:
    for result in job.results("two_restores_at_once_take_turns"):
        assert result == {"one": [], "two": [], "three": []}


def test_who_cannot_read_or_is_asked_for_something_else_tells_all(job: Job) -> None:
    results = job.results("who_cannot_read_tells_all")
    for rank, told in enumerate(results):
        assert told["differ"] == [[1], "['half']"]
        assert told["damaged"] == ["PeerFailedError" if rank else "ChecksumError", True]


@pytest.mark.slow
def test_who_dies_before_the_broadcast_is_named(tmp_path: Path) -> None:
    job = run_job(tmp_path, 3, ["one_dies_before_the_broadcast"])
    for rank in (0, 1):
        told = job.result("one_dies_before_the_broadcast", rank)
        assert told[:2] == ["PeerSilentError", [2]], told
