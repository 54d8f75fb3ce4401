"""Items under Orbax's names, in a job of several processes."""

from __future__ import annotations

import pytest
from tests.processes.launcher import Job

pytestmark = [pytest.mark.process, pytest.mark.timeout(178)]


def test_handlers_of_each_kind_save_one_checkpoint(orbax_job: Job) -> None:
    parts = sorted(f"part_{rank}" for rank in range(orbax_job.count))
    for result in orbax_job.results("orbaxs_names_save_items"):
        assert [result[name] for name in ("state", "tree", "key", "by Orbax")] == [[], [], [], []]
        assert (result["extra"], result["custom"]) == ({"step": 7}, {"a": 1})
        assert result["own"] == [*parts, "part_all"]
        assert result["items"] == ["extra", "key", "one", "own", "state", "state_of_numpy", "tree"]
        assert result["there"] == ["one", "step"]

    written = orbax_job.folder / "orbaxs_names_save_items" / "step" / "own" / "part_all"
    assert written.read_text().split() == [*parts, "tree"]  # finalised once, when all had written


def test_items_that_differ_are_told_in_each_process(orbax_job: Job) -> None:
    for result in orbax_job.results("orbaxs_items_that_differ_are_refused"):
        value, name = result["told"]
        assert "item extra" in value
        assert '{"step": 7}' in value
        assert '{"step": 8}' in value
        assert "item a" in name
        assert "item b" in name
        assert result["there"] == []


def test_the_failure_of_one_handler_ends_the_save_for_all(orbax_job: Job) -> None:
    last = orbax_job.count - 1
    told = [last, "LookupError: no such thing"]
    for rank, result in enumerate(orbax_job.results("a_handler_fails_in_one_process")):
        failure = "raised" if rank == last else told
        assert result == {
            "a": [failure, "saved"],
            "c": [failure, "saved"],
            "alone": [failure],
            "there": ["step a", "step c"],
        }


def test_the_options_of_an_array_handler_hold_for_all(orbax_job: Job) -> None:
    last = orbax_job.count - 1
    for result in orbax_job.results("orbaxs_array_options_hold_together"):
        assert [result[name] for name in ("one", "last", "two", "bare", "recorded")] == [[]] * 5
        writers = {
            name: [at for at, nbytes in enumerate(result[f"bytes of {name}"]) if nbytes]
            for name in ("one", "last", "two")
        }
        assert writers == {"one": [0], "last": [last], "two": [0, orbax_job.count // 2]}
        first, second = (result["bytes of two"][at] for at in writers["two"])
        assert first == second
        assert "_sharding" in result["in recorded"]
        assert "_sharding" not in result["in bare"]
        assert "array_metadatas" in result["in recorded"]
        assert "array_metadatas" not in result["in bare"]
