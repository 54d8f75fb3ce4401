"""A leaf type with a file of its own for each leaf, and a stage that counts what passes it."""

from __future__ import annotations

__all__ = ("Tally", "Vocabulary", "VocabularyHandler", "handlers")

import json
import os
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.kernel import Actor, ParamInfo, SaveRun, StagedBatch, TypeHandler


@dataclass
class Vocabulary:
    """Words, in the order of their numbers."""

    words: list[str] = field(default_factory=list[str])


class VocabularyHandler:
    """Stores each `Vocabulary` as a JSON file, written by threads of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)

    def typestr(self) -> str:
        return "example.Vocabulary"

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Future[None]]:
        texts = [json.dumps(value.words) for value in values]  # a copy, so they are staged
        return [self._pool.submit(_write, info, text) for info, text in zip(infos, texts, strict=True)]

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Vocabulary]:
        return [Vocabulary(_read(info)) for info in infos]

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        return [None for _ in infos]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        sizes = [sum(map(len, value.words)) for value in values]
        return [(size, size) for size in sizes]

    def finalize(self, directory: str) -> None:
        """Nothing is left to do."""


def _write(info: ParamInfo, text: str) -> None:
    with open(_path(info), "w", encoding="utf-8") as file:
        file.write(text)


def _read(info: ParamInfo) -> list[str]:
    with open(_path(info), encoding="utf-8") as file:
        words: list[str] = json.load(file)
        return words


def _path(info: ParamInfo) -> str:
    return os.path.join(info.directory, f"{info.name}.vocabulary.json")


def handlers() -> dict[type, TypeHandler]:
    """What the entry point in the group `penstock.handlers` names."""
    return {Vocabulary: VocabularyHandler()}


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts the bytes of a save, and says how many at its end; goes between `device_to_host` and `write`."""

    concurrency: int = 1

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        nbytes = 0

        async def count(batch: StagedBatch) -> StagedBatch:
            nonlocal nbytes
            nbytes += batch.nbytes
            return batch

        yield count
        run.events.info("tally.counted", path=run.path, nbytes=nbytes)
