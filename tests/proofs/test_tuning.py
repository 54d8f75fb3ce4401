"""`make tuning` with a store that waits for nothing, and no time to tune."""

from __future__ import annotations

import anyio
from tests.proofs.tuning import CASES, Case, SlowStore, rows_of, table

MIB = 2**20


def test_all_of_the_grid_is_measured_and_is_as_fast_as_it_is_without_time_to_tune() -> None:
    case = Case("no waits", SlowStore(), 4 * MIB)

    save, restore = anyio.run(rows_of, case, MIB, 0.0, 1)

    assert (save.flow, restore.flow) == ("save", "restore")
    assert save.found == restore.found == {}
    assert save.best in case.grid("save")
    assert restore.best in case.grid("restore")
    assert len(case.grid("save")) == 18
    lines = table([save, restore]).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| no waits | save | ")


def test_stores_are_slow_in_each_way() -> None:
    stores = [case.store for case in CASES]
    assert any(store.latency_s for store in stores)
    assert any(store.stream_rate < 1e8 for store in stores)
    assert any(store.total_rate < 1e8 for store in stores)
    assert any(case.limit_bytes for case in CASES)
