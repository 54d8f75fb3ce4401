"""Whatever is asked of a strange checkpoint ends in an error of penstock or a result, in little memory."""

from __future__ import annotations

import resource
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpointer.strange_checkpoints import STRANGE

import penstock
from penstock.errors import PenstockError

MEMORY = 3 * 2**30
"""More address space than all of these take together; some claim far more."""


@contextmanager
def bounded_memory() -> Generator[None]:
    """Refuse what is asked for beyond `MEMORY`, with a MemoryError."""
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def questions(
    checkpointer: penstock.Checkpointer, path: Path, out: Path
) -> Mapping[str, Callable[[], Awaitable[object]]]:
    """All that can be asked of the checkpoint at `path`, which lies in a directory of steps."""
    like = {"a": np.zeros(4, np.float32)}
    budget: Any = {"memory": checkpointer.engine.memory}

    async def manage() -> None:
        async with penstock.CheckpointManager(path.parent, read_only=True) as manager:
            manager.all_steps()
            await manager.restore()

    async def follow() -> None:
        async for _ in penstock.watch(path.parent, timeout_s=0):
            return

    return {
        "restore": lambda: checkpointer.restore(path),
        "restore like": lambda: checkpointer.restore(path, like=like),
        "restore the latest": lambda: checkpointer.restore(path.parent),
        "restore items": lambda: checkpointer.restore_items(path),
        "metadata": lambda: checkpointer.metadata(path),
        "verify": lambda: checkpointer.verify(path.parent),
        "convert": lambda: penstock.convert(path, out / "converted", **budget),
        "export": lambda: penstock.convert(path, out / "x.safetensors", **budget),
        "repair": lambda: penstock.repair(path, out / "repaired", **budget),
        "manage": manage,
        "follow": follow,
        "seal": lambda: penstock.seal(path),  # last, because it writes
    }


@pytest.mark.thinned(3)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", STRANGE)
async def test_a_strange_checkpoint_is_restored_or_an_error_of_penstock(name: str, tmp_path: Path) -> None:
    path, out = tmp_path / "steps" / "7", tmp_path / "out"
    path.parent.mkdir()
    STRANGE[name](path)
    with bounded_memory():
        async with penstock.Checkpointer(memory_limit="64MiB") as checkpointer:
            for asked in questions(checkpointer, path, out).values():
                try:
                    await asked()
                except (PenstockError, TimeoutError):  # the latter if no step came
                    continue

            assert checkpointer.statistics().leased == 0

    left = {file.name for file in out.iterdir()} if out.exists() else set[str]()
    assert left <= {"converted", "x.safetensors", "repaired"}
