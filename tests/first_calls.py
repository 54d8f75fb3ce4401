"""A program that calls each kind of operation for the first time, and says what was imported meanwhile.

Run as `python first_calls.py BACKEND FOLDER [warm]`; writes JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Awaitable, Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import anyio

import penstock


class Witness(MetaPathFinder):
    """Sees each module that is looked for, and where."""

    def __init__(self) -> None:
        self.loop_thread = threading.get_ident()
        self.on_the_loop: list[str] = []

    def find_spec(self, fullname: str, *_: object) -> None:
        if threading.get_ident() == self.loop_thread:
            self.on_the_loop.append(fullname)


def tree() -> dict[str, Any]:
    return {"a": [1.5, 2], "b": "text"}


async def one_shot(folder: Path) -> None:
    composite = penstock.Composite(state=tree(), other=penstock.items.Json({"x": 1}))
    path = folder / "one"
    await penstock.save(path, tree())
    await penstock.restore(path)
    await penstock.metadata(path)
    await penstock.verify(path)
    await penstock.save(folder / "items", composite)
    await penstock.restore_items(folder / "items")


async def in_a_checkpointer(folder: Path) -> None:
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(folder / "open", tree()))
        await checkpointer.restore(folder / "open", like=tree())
        await checkpointer.metadata(folder / "open")
        async for _ in checkpointer.stream(folder / "open"):
            pass


async def in_a_manager(folder: Path) -> None:
    keep = penstock.steps.KeepLast(1)
    async with penstock.CheckpointManager(folder / "run", keep=keep) as manager:
        for step in range(2):
            saving = await manager.save(step, tree(), metrics={"loss": 1.0})
            assert saving is not None
            await saving

        await manager.restore()
        await manager.metadata()
        await manager.best_step("loss")
        await manager.wait()


async def watching(folder: Path) -> None:
    async for _ in penstock.watch(folder / "run", until=lambda: True):
        pass


async def course(folder: Path, warm: bool) -> dict[str, list[str]]:
    witness = Witness()
    sys.meta_path.insert(0, witness)
    if warm:
        await penstock.warm_up()
    before = set(sys.modules)
    (folder / "run").mkdir()
    # Watching needs the least, and is first with an empty root.
    calls: list[Callable[[Path], Awaitable[None]]] = [watching, one_shot, in_a_checkpointer, in_a_manager]
    for call in (*calls, watching):
        await call(folder)

    return {"on_the_loop": witness.on_the_loop, "after": sorted(set(sys.modules) - before)}


if __name__ == "__main__":
    backend, folder, *warm = sys.argv[1:]
    sys.stdout.write(json.dumps(anyio.run(course, Path(folder), bool(warm), backend=backend)))
