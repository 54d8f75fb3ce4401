"""Leaves whose handlers write files of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tests.processes.job_case import Here, checkpointer
from tests.processes.trees import P, differences, mesh_of, spread

from penstock import HandlerRegistry, PerProcess
from penstock.errors import HandlerFailedError, PeerError
from penstock.handlers import default_handlers
from penstock.kernel import ParamInfo, Waitable


@dataclass(frozen=True)
class Note:
    """A leaf of one text."""

    text: str


@dataclass(frozen=True)
class Slices:
    """A leaf of which each process holds a part."""

    mine: str


class NoteHandler:
    """Writes a file for each note, and notes which files there are when it is completed."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.called: list[str] = []

    def typestr(self) -> str:
        return "tests.Note"

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        return [(100, 100)] * len(values)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Waitable]:
        self.called += [info.name for info in infos]
        if self.fails:
            raise RuntimeError("no more paper")

        for value, info in zip(values, infos, strict=True):
            self._file(info).write_text(value.text)

        return [_done()]

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        return [Note(self._file(info).read_text()) for info in infos]

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        return [None] * len(infos)

    def finalize(self, directory: str) -> None:
        found = sorted(name for name in os.listdir(directory) if name.endswith(".note"))
        Path(directory, "all.notes").write_text("\n".join(found))

    def _file(self, info: ParamInfo) -> Path:
        return Path(info.directory) / f"{info.name}.note"


class SlicesHandler(NoteHandler):
    """Writes from every process."""

    every_process = True

    def typestr(self) -> str:
        return "tests.Slices"

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Waitable]:
        for value, info in zip(values, infos, strict=True):
            self._part(info).write_text(value.mine)

        return []

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        return [Slices(self._part(info).read_text()) for info in infos]

    def finalize(self, directory: str) -> None: ...

    def _part(self, info: ParamInfo) -> Path:
        return Path(info.directory) / f"{info.name}.slice-{jax.process_index()}"


def _done() -> Future[None]:
    future = Future[None]()
    future.set_result(None)
    return future


async def handlers_write_files_of_their_own(here: Here) -> Any:
    mesh, path = mesh_of(here.count), here.folder / "step_1"
    tree: dict[str, Any] = {
        **spread({"x": np.arange(64.0).reshape(8, 8)}, {"x": P("host")}, mesh),
        "shared": [Note("a"), Note("b")],
        "slices": Slices(f"of {here.rank}"),
        "own": PerProcess({"note": Note(f"by {here.rank}"), "position": here.rank}),
    }
    handler = NoteHandler(fails=here.rank == here.last)
    told: dict[str, Any] = {}
    async with checkpointer(registry=_registry(handler)) as opened:
        try:
            await (await opened.save(path, tree))
        except HandlerFailedError as error:
            told["failed"] = ["here", str(error.key_path)]
        except PeerError as error:
            told["failed"] = [list(error.processes), str(error.key_path)]

    await here.meet("failed")
    assert here.names() == [], here.names()
    handler = NoteHandler()
    async with checkpointer(registry=_registry(handler)) as opened:
        save = await opened.save(path, tree)
        told["called"] = sorted(handler.called)
        await save
        told["differs"] = differences(await opened.restore(path, like=tree), tree)
        bare = await opened.restore(path)

    told["bare"] = [bare["own"][f"process_{rank}-of-{here.count}"]["note"].text for rank in range(here.count)]
    told["all"] = (path / "all.notes").read_text().split()
    return told


def _registry(handler: NoteHandler) -> HandlerRegistry:
    registry = default_handlers(entry_points=False)
    registry.register(Note, handler)
    registry.register(Slices, SlicesHandler())
    return registry
