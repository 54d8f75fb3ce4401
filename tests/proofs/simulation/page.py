"""The tables of docs/reference/scale.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

HEAD: Final = "## Measured\n"
MIB: Final = 2**20
GIB: Final = 2**30

Column: TypeAlias = tuple[str, Callable[[Any], str]]

OPERATION: Final[Sequence[Column]] = (
    ("processes", lambda one: f"{one['processes']:,}"),
    ("all of them, wall", lambda one: f"{one['wall_s']:.3f} s"),
    ("CPU for each", lambda one: f"{one['cpu_s'] / one['processes'] * 1e3:.2f} ms"),
    ("calls of the primary", lambda one: f"{one['calls_primary']}"),
    ("of a worker, at most", lambda one: f"{one['calls_worker']}"),
    ("primary sends", lambda one: _kb(one["sent_primary"])),
    ("and receives", lambda one: _kb(one["received_primary"])),
    ("a worker sends", lambda one: _kb(one["sent_worker"])),
    ("and receives", lambda one: _kb(one["received_worker"])),
)
PRIMARY: Final[Sequence[Column]] = (
    ("leaves", lambda one: f"{one['leaves']:,}"),
    ("processes", lambda one: f"{one['processes']:,}"),
    (
        "a worker's part",
        lambda one: f"{one['parts_bytes'] / one['processes'] / 1e3:.1f} kB, {one['part_s'] * 1e3:.1f} ms",
    ),
    ("all parts", lambda one: f"{one['parts_bytes'] / MIB:.1f} MiB"),
    ("first save", lambda one: _seconds(one, "first")),
    ("next saves", lambda one: _seconds(one, "again")),
    ("peak memory", lambda one: f"{one['peak_mib']:.0f} MiB"),
    ("longest stall", lambda one: f"{one['stall_s'] * 1e3:.0f} ms"),
    ("when idle", lambda one: f"{one['idle_s'] * 1e3:.0f} ms"),
    ("index", lambda one: f"{one['index_bytes'] / MIB:.1f} MiB"),
    ("checksums", lambda one: f"{one['integrity_bytes'] / MIB:.1f} MiB"),
    ("shardings", lambda one: f"{one['sharding_bytes'] / MIB:.1f} MiB"),
)
READERS: Final[Sequence[Column]] = (
    ("leaves", lambda one: f"{one['leaves']:,}"),
    ("processes", lambda one: f"{one['processes']:,}"),
    ("one reader reads", lambda one: f"{one['open_bytes'] / MIB:.1f} MiB"),
    ("in", lambda one: _seconds(one, "open")),
    ("with", lambda one: f"{one['open_mib']:.0f} MiB"),
    ("calls of the store", lambda one: f"{one['open_calls']:,}"),
    ("all processes read", lambda one: f"{one['open_bytes'] * one['processes'] / GIB:.1f} GiB"),
)

ANSWERED: Final[Sequence[Column]] = (
    ("leaves", lambda one: f"{one['leaves']:,}"),
    ("processes", lambda one: f"{one['processes']:,}"),
    ("sent to each", lambda one: f"{one['told_bytes'] / MIB:.1f} MiB"),
    ("each opens it in", lambda one: _seconds(one, "told")),
    ("and reads", lambda one: _kb(one["told_read_bytes"])),
    ("with calls of the store", lambda one: f"{one['told_calls']:,}"),
)


def write_page(page: Path, found: Any, machine: Any) -> None:
    """Write everything behind the heading anew."""
    said, _, _ = page.read_text().partition(HEAD)
    versions = machine["versions"]
    told = f"{machine['date']}, {machine['cores']} cores, jax {versions['jax']}. By `make simulate`."
    parts = [
        told,
        "**One operation, by jax's coordination service**, a client for each process:",
        table(OPERATION, found["service"]),
        "**One operation, by a service in memory**, all processes in one event loop:",
        table(OPERATION, found["memory"]),
        "**The primary**, from the others' parts to the published checkpoint:",
        table(PRIMARY, found["trees"]),
        "**Readers**, each opening all of it:",
        table(READERS, found["trees"]),
        "**Readers of one restore with `replica_axis`**: process 0 opens it, and sends what it was answered.",
        table(ANSWERED, found["trees"]),
    ]
    page.write_text(said + HEAD + "".join(f"\n{part}\n" for part in parts))


def table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Return a table in Markdown."""
    head = f"| {' | '.join([name for name, _ in columns])} |\n|{' --- |' * len(columns)}"
    return "\n".join([head, *[f"| {' | '.join([cell(row) for _, cell in columns])} |" for row in rows]])


def _seconds(one: Any, name: str) -> str:
    return f"{one[f'{name}_s']:.2f} s (CPU {one[f'{name}_cpu_s']:.2f} s)"


def _kb(nbytes: int) -> str:
    return f"{nbytes / 1e3:,.1f} kB"
