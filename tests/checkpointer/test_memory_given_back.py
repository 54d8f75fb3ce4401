"""What a long operation freed goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.checkpointer import operations as lifetime

pytestmark = pytest.mark.anyio
N_BLOCKS = 100_000
BLOCK = 700  # more than Python's own allocator takes


def resident() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def free_below_a_block() -> bytes:
    """Free memory that the allocator keeps, because the last of its blocks is still used."""
    blocks = [bytes(BLOCK) for _ in range(N_BLOCKS)]
    return blocks[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
@pytest.mark.parametrize("is_long", [True, False])
async def test_freed_memory_goes_back_after_a_long_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    await penstock.save(tmp_path / "c", {"a": np.ones(3)})
    monkeypatch.setattr(lifetime, "LONG_S", 0.0 if is_long else 1000.0)

    kept = free_below_a_block()
    before = resident()
    await penstock.metadata(tmp_path / "c")

    assert (before - resident() > N_BLOCKS * BLOCK // 2) is is_long
    assert kept
