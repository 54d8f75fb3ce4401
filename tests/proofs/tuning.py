"""Tunes on slow stores for a minute each, and compares what was found with all of a grid. `make tuning`.

The stores wait for each operation: for a latency, for the bandwidth of a stream, for one that all streams
share, and under a tight budget of memory. Of each, every combination of workers and pieces (and budgets,
where one is set) is measured, and so is what `penstock tune` and `report.explain()` end at. Both should be as
fast as the best of the grid, but for noise.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, final

import anyio
import numpy as np

from penstock import Config, SaveReport
from penstock.kernel import Store, StoreWrapper
from penstock.kernel.memory.regulator import Flow
from penstock.testing import MemoryStore
from penstock.tuning import Options, RealRuns, Space, Tuned, search

MIB: Final = 2**20
LIMIT_S: Final = 60.0
NOISE: Final = 1.10
"""What is found may take so much longer than the best of a grid, which is the luckiest of many."""

ROUNDS: Final = 5
"""So often is each measured in the end, in turn. The fastest counts: a busy machine only makes one slower."""


@final
class SlowStore(StoreWrapper):
    """A store in memory that waits for each operation.

    Args:
        latency_s: Of each.
        stream_rate: Bytes per second of one operation.
        total_rate: And of all together, one after another.
    """

    def __init__(self, latency_s: float = 0.0, stream_rate: float = 1e12, total_rate: float = 1e12) -> None:
        super().__init__(MemoryStore())
        self.latency_s = latency_s
        self.stream_rate = stream_rate
        self.total_rate = total_rate
        self._turn = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int) -> None:
        """Wait as long as an operation with so many bytes takes."""
        now = time.monotonic()
        with self._turn:
            self._free_at = max(now, self._free_at) + nbytes / self.total_rate
            until = max(self._free_at, now + self.latency_s + nbytes / self.stream_rate)

        time.sleep(max(until - time.monotonic(), 0.0))

    def create_data_file(self, path: str) -> Any:
        self.wait(0)
        return _SlowFile(self.inner.create_data_file(path), self)

    def open_data_file(self, path: str) -> Any:
        self.wait(0)
        return _SlowFile(self.inner.open_data_file(path), self)

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        self.wait(len(data))
        return self.inner.write_file(path, data, create=create)

    def read_file(self, path: str) -> bytes:
        data = self.inner.read_file(path)
        self.wait(len(data))
        return data


@final
class _SlowFile:
    def __init__(self, inner: Any, store: SlowStore) -> None:
        self._inner = inner
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._store.wait(sum([buffer.nbytes for buffer in buffers]))
        self._inner.write_at(offset, buffers)

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._store.wait(sum([buffer.nbytes for buffer in buffers]))
        self._inner.read_at(offset, buffers)


@final
@dataclass(frozen=True)
class Case:
    """A store, and the budget that is set."""

    name: str
    store: SlowStore
    limit_bytes: int | None = None

    @property
    def config(self) -> Config:
        """What holds at the beginning."""
        return (
            Config()
            if self.limit_bytes is None
            else Config().changed({"memory": {"limit_bytes": self.limit_bytes}})
        )

    def grid(self, flow: Flow) -> list[Options]:
        """Return every combination of values."""
        worker = "save.write.concurrency" if flow == "save" else "restore.read.concurrency"
        limits = [{}] if self.limit_bytes is None else [{}, {"memory.limit_bytes": 256 * MIB}]
        return [
            {worker: workers, f"{flow}.piece_bytes": piece * MIB, **cast("Mapping[str, object]", limit)}
            for workers in (4, 16, 64)
            for piece in (1, 4, 16)
            for limit in limits
        ]


CASES: Final = (
    Case("50 ms for each operation", SlowStore(latency_s=0.05)),
    Case("8 MB/s for each stream", SlowStore(stream_rate=8e6)),
    Case("30 MB/s in all", SlowStore(total_rate=30e6)),
    Case("10 ms, 8 MB/s for each stream, 50 MB/s in all", SlowStore(0.01, 8e6, 50e6)),
    Case("30 ms for each operation, a budget of 16 MiB", SlowStore(0.03), 16 * MIB),
)


@final
@dataclass(frozen=True)
class Row:
    """Seconds of one flow on one store."""

    case: str
    flow: Flow
    before_s: float
    tuned_s: float
    found: Options
    took_s: float
    best_s: float
    best: Options
    advised_s: float

    @property
    def is_as_fast(self) -> bool:
        """True if what was found is as fast as the best of the grid."""
        return self.tuned_s <= NOISE * min(self.best_s, self.before_s)


def tree_of(nbytes: int) -> dict[str, Any]:
    """Return noise in eight arrays, and two hundred small ones."""
    random = np.random.default_rng(0)
    large = {f"w{n}": random.standard_normal(nbytes // 32, np.float32) for n in range(8)}
    return large | {f"s{n}": np.full(64, n, np.float32) for n in range(200)}


async def fastest_s(runs: RealRuns, flow: Flow, each: Sequence[Options], n: int) -> list[float]:
    """Return the fastest of some runs of each, measured in turn."""
    found: list[list[float]] = [
        [(await runs.measure(flow, options)).seconds for options in each] for _ in range(n)
    ]
    return [min(seconds) for seconds in zip(*found, strict=True)]


async def advised(runs: RealRuns) -> Options:
    """Follow the advice of one report after another; return the options at its end."""
    options: Options = {}
    for _ in range(6):
        report = (await runs.measure("save", options)).report
        assert isinstance(report, SaveReport)
        advice = report.diagnosed().options
        if not advice:
            break

        options = {**options, **advice}

    return options


async def rows_of(case: Case, nbytes: int, limit_s: float = LIMIT_S, rounds: int = ROUNDS) -> list[Row]:
    """Tune for a minute, measure all of the grid, and what both found some times more."""
    runs = RealRuns("/tuning", tree_of(nbytes), case.config, cast("Store", case.store))
    case.store.make_directory("/tuning")
    await runs.measure("save", {})
    start = time.monotonic()
    tuned: Tuned = await search(
        runs.measure,
        Space(most_memory=0.0 if case.limit_bytes is None else 512 * MIB),
        spent=lambda: (time.monotonic() - start) / limit_s if limit_s else 1.0,
    )
    took_s = time.monotonic() - start
    followed = await advised(runs)
    rows: list[Row] = []
    for flow in cast("Sequence[Flow]", ("save", "restore")):
        # The best of the grid was lucky: the first three are measured again.
        grid = [((await runs.measure(flow, options)).seconds, n) for n, options in enumerate(case.grid(flow))]
        first = [case.grid(flow)[n] for _, n in sorted(grid)[:3]]
        seconds = await fastest_s(runs, flow, [{}, tuned.options, followed, *first], rounds)
        best_s = min(seconds[3:])
        rows.append(
            Row(
                case.name,
                flow,
                seconds[0],
                seconds[1],
                tuned.options,
                took_s,
                best_s,
                first[seconds[3:].index(best_s)],
                seconds[2] if flow == "save" else math.nan,
            )
        )

    return rows


def words(options: Options) -> str:
    """Return options in short."""
    sizes = {key: value // MIB for key, value in options.items() if isinstance(value, int) and value >= MIB}
    named = [f"{key.rpartition('.')[2]} {sizes.get(key, value)}" for key, value in options.items()]
    short = ", ".join(named).replace("concurrency", "workers").replace("_bytes", " MiB")
    return short.replace("piece MiB ", "pieces of ").replace("limit MiB ", "budget of ") or "as it is"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| store | | as it is | tuned | best of the grid | which is | following `explain()` |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in rows:
        advice = "" if math.isnan(row.advised_s) else f"{row.advised_s:.2f} s"
        lines.append(
            f"| {row.case} | {row.flow} | {row.before_s:.2f} s | {row.tuned_s:.2f} s | {row.best_s:.2f} s | "
            f"{words(row.best)} | {advice} |"
        )

    return "\n".join(lines)


def main() -> int:
    """Print the table; return 1 if something else than what was found is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=32, help="of arrays")
    parser.add_argument("--only", default="", help="stores whose name contains this")
    options = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        if options.only in case.name:
            found = anyio.run(rows_of, case, options.mib * MIB)
            rows += found
            for row in found:
                sys.stdout.write(f"{row}\n")

    sys.stdout.write(f"{table(rows)}\n")
    slower = [row for row in rows if not row.is_as_fast]
    for row in slower:
        sys.stdout.write(
            f"{row.case}, {row.flow}: {row.tuned_s:.2f} s is not as fast as {row.best_s:.2f} s\n"
        )

    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
