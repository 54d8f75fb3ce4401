"""What reading long documents takes counts against the memory budget, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import CorruptCheckpointError
from penstock.handlers import AutoLayout, LocalStore
from penstock.handlers.ocdbt.database_reader import index_bytes
from penstock.items import Composite, Json
from penstock.kernel.protocols import SMALL_DOCUMENT

pytestmark = pytest.mark.anyio

MIB = 2**20
MANY = 9000  # leaves: their documents have more than a MiB each
TREE: dict[str, Any] = {f"a_name_of_some_length_{at:06}": np.full(2, at, np.int32) for at in range(MANY)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "c"
    penstock.sync.save(path, TREE)
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "c.safetensors"
    penstock.sync.export_safetensors(TREE | {"x" * 2**19: np.zeros(1), "y" * 2**19: np.zeros(1)}, path)
    return path


def bytes_of_opening(path: Path) -> int:
    return AutoLayout().find(LocalStore(), str(path)).nbytes


async def test_the_documents_of_a_tree_are_added_up(saved: Path) -> None:
    metadata = (saved / "_METADATA").stat().st_size
    index = index_bytes(LocalStore(), str(saved))
    nodes = sum(file.stat().st_size for file in (saved / "d").iterdir()) - 8 * MANY

    assert min(metadata, index) > SMALL_DOCUMENT
    assert index == nodes
    assert bytes_of_opening(saved) == 2 * metadata + 5 * index


async def test_the_header_of_safetensors_counts(exported: Path) -> None:
    length = int.from_bytes(exported.read_bytes()[:8], "little")

    assert length > SMALL_DOCUMENT
    assert bytes_of_opening(exported) == 5 * length


async def test_small_documents_cost_nothing(tmp_path: Path) -> None:
    tree = {"a": np.ones(3), "b": "text"}
    await penstock.save(tmp_path / "c", tree)
    await penstock.export_safetensors({"a": np.ones(MIB)}, tmp_path / "s.safetensors")

    assert bytes_of_opening(tmp_path / "c") == bytes_of_opening(tmp_path / "s.safetensors") == 0
    async with penstock.Checkpointer() as checkpointer:
        await checkpointer.metadata(tmp_path / "c")
        assert checkpointer.statistics().peak == 0


async def test_a_long_json_item_counts(tmp_path: Path) -> None:
    numbers = [round(at / 7, 3) for at in range(200_000)]
    async with penstock.Checkpointer() as checkpointer:
        items = Composite(config=Json({"numbers": numbers}))
        await (await checkpointer.save(tmp_path / "c", items))

    (file,) = [each for each in tmp_path.rglob("*") if each.is_file() and each.stat().st_size > MIB]
    assert len(json.loads(file.read_bytes())["numbers"]) == len(numbers)
    found = AutoLayout().find(LocalStore(), str(tmp_path / "c"), "config")
    assert found.nbytes == 8 * file.stat().st_size


@pytest.mark.parametrize("what", ["saved", "exported"])
@pytest.mark.parametrize("fits", [True, False])
async def test_documents_are_leased_while_they_are_decoded(
    what: str, fits: bool, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    path: Path = request.getfixturevalue(what)
    needed = bytes_of_opening(path)
    async with penstock.Checkpointer(memory_limit=2 * needed if fits else needed // 2) as checkpointer:
        described = await checkpointer.metadata(path)
        assert checkpointer.statistics().peak == needed
        restored = await checkpointer.restore(path)
        statistics = checkpointer.statistics()

    assert (statistics.leased, statistics.peak) == (0, needed)
    assert len(described.leaves) == len(restored) >= MANY
    events = [text for text in caplog.messages if text.startswith("memory.oversize")]
    assert len(events) == (0 if fits else 2)
    assert all(f"nbytes={needed}" in text for text in events)


async def test_a_manifest_that_is_damaged_is_said_to_be(saved: Path) -> None:
    path = saved.rename(saved.with_name("damaged"))
    manifest = path / "manifest.ocdbt"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: len(whole) // 2])
    try:
        with pytest.raises(CorruptCheckpointError):
            await penstock.restore(path)
    finally:
        manifest.write_bytes(whole)
        path.rename(saved)


async def test_what_is_remembered_of_documents_counts_and_gives_way(saved: Path) -> None:
    limit = bytes_of_opening(saved)
    async with penstock.Checkpointer(memory_limit=limit) as checkpointer:
        await checkpointer.metadata(saved)
        statistics = checkpointer.statistics()
        assert 0 < statistics.cached <= limit
        await checkpointer.restore(saved)
        statistics = checkpointer.statistics()

    assert 0 < statistics.cached <= limit
    assert checkpointer.statistics().cached == 0  # closed: its caches die with it
