"""Copies that the processes of a job make together, of the parts that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint
from tests.steps.job_of_managers import COUNT, LIMITS, opened
from tests.steps.joint_steps import finished

from penstock import JobOptions
from penstock.errors import PeerFailedError, ReplacedError
from penstock.handlers import LocalStore
from penstock.handlers.coordinators import JobCoordinator
from penstock.kernel import MemoryRegulator, Threads
from penstock.steps import Disk
from penstock.testing import MemoryKeyValues
from penstock.verification.copying import CheckpointCopier, CopySource

pytestmark = pytest.mark.anyio


async def test_parts_of_two_saves_are_not_put_together(tmp_path: Path) -> None:
    """As where one process has published a step that is saved again, and another one not yet."""
    for root in ("one", "other"):

        def options(index: int, root: str = root) -> dict[str, Any]:
            disk = tmp_path / f"disk {index}" / root
            disk.mkdir(parents=True)
            return {"tiers": Disk(disk / "run"), "job": JobOptions(local_root=str(disk))}

        async with opened(tmp_path / root, options) as managers:
            await finished(managers, 1)

    parts = [tmp_path / f"disk {index}" / ("other" if index else "one") / "run/1" for index in range(COUNT)]
    service, store, target = MemoryKeyValues(), LocalStore(), tmp_path / "put together"
    raised: list[BaseException] = []

    async def copy(index: int) -> None:
        operation = JobCoordinator(service, index, COUNT, LIMITS).operation(str(target))
        copier = CheckpointCopier(store, store, Threads(), MemoryRegulator(1 << 24))
        with pytest.raises((ReplacedError, PeerFailedError)) as refused:
            await copier.copy_together(
                operation,
                {index: CopySource(store, str(parts[index]))},
                str(target),
                processes=range(COUNT),
                prepare=checkpoint,
            )

        raised.append(refused.value)

    async with create_task_group() as tasks:
        for index in range(COUNT):
            tasks.start_soon(copy, index)

    assert any(isinstance(error, ReplacedError) for error in raised)
    assert not target.exists()
