"""The simulation of thousands of processes, with a few."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from tests.proofs.simulation import __main__ as program
from tests.proofs.simulation.agreement import agree_by_the_service, agree_in_memory
from tests.proofs.simulation.chart import draw
from tests.proofs.simulation.page import HEAD
from tests.proofs.simulation.primary import save_as_primary
from tests.proofs.simulation.readers import open_as_reader, open_once_for_all


def test_calls_are_no_more_for_more_processes_in_memory_than_by_the_service() -> None:
    found = [
        anyio.run(agree_by_the_service, 3),
        anyio.run(agree_in_memory, 3),
        anyio.run(agree_in_memory, 48),
    ]
    # A look that comes too early is made once more; how often depends on how busy this machine is. So keys
    # are counted here: within the bounds of calls, and not more than these, however many processes there are.
    once = [
        {**each, "calls_primary": each["keys_primary"], "calls_worker": each["keys_worker"]} for each in found
    ]
    assert program.problems({"service": once[:1], "memory": once[1:], "trees": []}) == []
    assert max(each["keys_primary"] for each in found) <= 12
    assert found[2]["received_worker"] <= found[0]["received_worker"] + 200


@pytest.mark.parametrize("n_processes", [2, 12])
def test_what_the_primary_merges_is_a_checkpoint_with_all_parts(n_processes: int, tmp_path: Path) -> None:
    found = anyio.run(save_as_primary, 20, n_processes, tmp_path)
    assert found["again_s"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0", "step_1"]

    open_as_reader(tmp_path / "step_0")  # the first one may read modules, too
    # Counted are all reads of this process, also those of a thread that runs tests for another process.
    opened = min([open_as_reader(tmp_path / "step_1")["open_bytes"] for _ in range(3)])
    documents = [
        found[name] for name in ("index_bytes", "integrity_bytes", "sharding_bytes", "metadata_bytes")
    ]
    assert sum(documents) <= opened <= sum(documents) + 4096
    answered = open_once_for_all(tmp_path / "step_1")
    assert (answered["told_calls"], answered["told_read_bytes"] < 1024) == (0, True)


def test_a_simulation_that_exceeds_its_bound_fails() -> None:
    busiest = {"leaves": 10_000, "processes": 64, "first_cpu_s": 7.0, "again_cpu_s": 1.0, "peak_mib": 10.0}
    agreed = {"processes": 8, "calls_primary": 12, "calls_worker": 14}
    found = {"service": [agreed], "memory": [], "trees": [busiest, {**busiest, "leaves": 9}]}
    assert program.problems(found) == [
        "8 processes: calls_worker 14, more than 12",
        "10000 leaves of 64 processes: first_cpu_s 7.0, more than 6.0",
    ]


@pytest.mark.slow
@pytest.mark.process
def test_the_page_and_the_picture_are_written(tmp_path: Path) -> None:
    page, svg = tmp_path / "page.md", tmp_path / "chart.svg"
    page.write_text(f"# Scale\n\nWords.\n\n{HEAD}\nold\n")
    assert program.main(["--small", "--page", str(page), "--svg", str(svg)]) == 0

    written = page.read_text()
    assert written.startswith("# Scale\n\nWords.\n")
    assert "| 20 | 4 |" in written
    assert "old" not in written
    assert svg.read_text().count("<circle") == 5 + 1 + 2 + 3
    assert draw({"service": [], "memory": [], "trees": []})
