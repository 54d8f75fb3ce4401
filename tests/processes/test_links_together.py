"""Links to a base, of what several processes save together."""

from __future__ import annotations

import pytest
from tests.processes.base_cases import FORMATS
from tests.processes.launcher import Job

pytestmark = [pytest.mark.process, pytest.mark.timeout(178)]

ROWS = 64 * 64 * 4
"""Bytes of one of the arrays that change."""


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_base_holds_is_linked_by_each_process(job: Job, name: str) -> None:
    reports = [result[name] for result in job.results("what_a_base_holds_is_linked")]
    first, second, third = [[report[step] for report in reports] for step in range(3)]

    assert all(kept == 0 for _, kept in first)
    for before, (wrote, kept) in zip(first, second, strict=True):
        assert wrote + kept == before[0]
        assert kept > 0
    numpy = 10 * 8
    assert sum(wrote for wrote, _ in second) == ROWS + numpy
    # A file of which less than half is still needed is not kept alive for that.
    assert sum(wrote for wrote, _ in third) < sum(wrote for wrote, _ in first) / 20


def test_what_has_the_same_bytes_is_linked_by_each_process(job: Job) -> None:
    results = job.results("what_has_the_same_bytes_is_linked")
    assert sum(second[0] for _, second in results) == ROWS
    assert all(second[1] > 0 for _, second in results)


def test_what_differs_in_a_base_is_written_anew_by_the_process_that_links_it(job: Job) -> None:
    *others, last = job.results("what_differs_in_a_base_is_written")
    assert last[0] > 0
    assert last[1] > 0
    assert all(kept > 0 for _, kept in others)


def test_what_one_process_cannot_link_it_writes(job: Job) -> None:
    *others, last = job.results("what_cannot_be_linked_is_written")
    assert last["first"][1] == 0
    assert any(result["first"][1] > 0 for result in others)


def test_what_cannot_be_linked_any_more_ends_the_save_for_all(job: Job) -> None:
    primary, *others = job.results("what_cannot_be_linked_is_written")
    assert primary["second"][0] == "StorageError"
    for result in others:
        assert result["second"][0] == "PeerFailedError"
        assert "process 0 ended in stage 'agree'" in result["second"][1]
    assert primary["there"] == ["0", "1"]
