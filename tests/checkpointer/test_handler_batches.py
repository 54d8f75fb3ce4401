"""The batch contract: a save or a restore calls a handler once for all of its leaves."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, final

import pytest

from penstock import Checkpointer, HandlerRegistry
from penstock.handlers import Composite, default_handlers
from penstock.kernel import ParamInfo

pytestmark = pytest.mark.anyio


class Note:
    """A leaf type of a third party."""

    def __init__(self, text: str) -> None:
        self.text = text


class Remark(Note):
    """Another leaf type with the same handler."""


@final
class NotesHandler:
    """Writes one file for each batch, so a second batch in a save would overwrite the first."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.calls: list[tuple[str, list[str]]] = []

    def typestr(self) -> str:
        return "note"

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Future[None]]:
        self.calls.append(("serialize", [info.name for info in infos]))
        texts = {info.name: value.text for value, info in zip(values, infos, strict=True)}
        Path(infos[0].directory, "notes.json").write_text(json.dumps(texts))
        return []

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        self.calls.append(("deserialize", [info.name for info in infos]))
        texts = json.loads(Path(infos[0].directory, "notes.json").read_text())
        return [Note(texts[info.name]) for info in infos]

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        return [None for _ in infos]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        self.calls.append(("memory_size", [value.text for value in values]))
        return [(self.size, self.size) for _ in values]

    def finalize(self, directory: str) -> None:
        self.calls.append(("finalize", [os.path.basename(directory)]))


def registry(handler: NotesHandler) -> HandlerRegistry:
    handlers = default_handlers(entry_points=False)
    handlers.register(Note, handler)
    handlers.register(Remark, handler)
    return handlers


TREE = {"a": Note("x"), "b": {"n": 1, "c": Note("y")}, "d": [Remark("z"), 2.5]}
NAMES = ["a", "b.c", "d.0"]
LIKE = {"a": Note("x"), "b": {"n": 1, "c": Note("y")}, "d": [Note("z"), 2.5]}


def texts(tree: Any) -> list[str]:
    return [tree["a"].text, tree["b"]["c"].text, tree["d"][0].text]


async def test_a_handler_that_writes_one_file_for_each_batch_does_not_overwrite_itself(
    tmp_path: Path,
) -> None:
    handler = NotesHandler()
    async with Checkpointer(registry=registry(handler)) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", TREE))
        handler.calls.clear()
        assert texts(await checkpointer.restore(tmp_path / "a")) == ["x", "y", "z"]
        assert texts(await checkpointer.restore(tmp_path / "a", like=LIKE)) == ["x", "y", "z"]

    assert [names for call, names in handler.calls if call == "deserialize"] == [NAMES, NAMES]


async def test_a_save_calls_each_method_once(tmp_path: Path) -> None:
    handler = NotesHandler()
    async with Checkpointer(registry=registry(handler)) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", TREE))

    assert handler.calls == [
        ("memory_size", ["x", "y", "z"]),
        ("serialize", NAMES),
        ("finalize", ["a.orbax-checkpoint-tmp"]),
    ]


@pytest.mark.parametrize("first", ["b.c", "*"])
async def test_prioritised_leaves_stay_one_batch(tmp_path: Path, first: str) -> None:
    def goes_first(keys: tuple[str, ...]) -> bool:
        return fnmatch(".".join(keys), first)

    handler = NotesHandler()
    async with Checkpointer(registry=registry(handler)) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", TREE, prioritise=goes_first))
        assert texts(await checkpointer.restore(tmp_path / "a", prioritise=goes_first)) == ["x", "y", "z"]

    calls = [call for call, _ in handler.calls]
    assert (calls.count("serialize"), calls.count("deserialize")) == (1, 1)


async def test_leaves_of_a_stream_with_an_order_stay_one_batch(tmp_path: Path) -> None:
    handler = NotesHandler()
    async with Checkpointer(registry=registry(handler)) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", TREE))
        stream = checkpointer.stream(tmp_path / "a", order=["d.1", "b.c"])
        found = [".".join(keys) async for keys, _ in stream]

    assert (found[0], sorted(found[1:4])) == ("d.1", NAMES)
    assert [names for call, names in handler.calls if call == "deserialize"] == [NAMES]


async def test_each_item_has_a_batch_of_its_own_in_its_own_directory(tmp_path: Path) -> None:
    handler = NotesHandler()
    async with Checkpointer(registry=registry(handler)) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", Composite({"one": TREE, "two": {"a": Note("w")}})))
        two: Any = await checkpointer.restore(tmp_path / "a", item="two")
        assert texts(await checkpointer.restore(tmp_path / "a", item="one")) == ["x", "y", "z"]
        assert two["a"].text == "w"

    assert [names for call, names in handler.calls if call == "serialize"] == [NAMES, ["a"]]
    finished = [names for call, names in handler.calls if call == "finalize"]
    assert sorted(finished) == [["one"], ["two"]]  # at one time


async def test_one_checkpointer_serves_calls_with_handlers_of_their_own(tmp_path: Path) -> None:
    first, second = NotesHandler(), NotesHandler()
    async with Checkpointer(registry=registry(first)) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", TREE))
        other = checkpointer.with_handlers(registry(second))
        save = await other.save(tmp_path / "b", TREE)
        assert texts(await other.restore(tmp_path / "a")) == ["x", "y", "z"]
        assert other.statistics() == checkpointer.statistics()

    assert save.done  # the context manager waited for it
    assert [call for call, _ in second.calls].count("serialize") == 1
    assert [call for call, _ in first.calls].count("serialize") == 1
    assert "deserialize" not in [call for call, _ in first.calls]


async def test_a_batch_above_the_budget_is_not_split_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = NotesHandler(size=400)
    async with Checkpointer(registry=registry(handler), memory_limit=1000) as checkpointer:
        with caplog.at_level(logging.WARNING, "penstock"):
            report = await (await checkpointer.save(tmp_path / "a", TREE))
            assert texts(await checkpointer.restore(tmp_path / "a", like=LIKE)) == ["x", "y", "z"]

    told: list[dict[str, Any]] = [vars(record)["penstock"] for record in caplog.records]
    name = f"{__name__}.NotesHandler"
    assert report.peak_leased_bytes == 1200
    assert [event["event"] for event in told] == ["memory.oversize"] * 2
    assert [(event["nbytes"], event["handler"], event["n_leaves"]) for event in told] == [(1200, name, 3)] * 2
    assert [names for call, names in handler.calls if call == "serialize"] == [NAMES]
    assert [names for call, names in handler.calls if call == "deserialize"] == [NAMES]
