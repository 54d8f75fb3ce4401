"""What the commands are tried on: a run, items, safetensors, and damaged ones, with hostile names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.cli import main

EVIL = "\x1b]0;owned\x07<script>alert(1)</script>\u202e"
"""The name of a leaf: an escape sequence that sets a terminal's title, a script, a change of direction."""


@dataclass(frozen=True)
class Stored:
    """Paths to try."""

    folder: Path  #: of all of these
    run: Path  #: steps 1 and 2 are finished, 0 is damaged, 4 was interrupted
    items: Path  #: a checkpoint of a tree and JSON
    tensors: Path  #: a safetensors file
    shards: Path  #: a folder of them

    @property
    def step(self) -> Path:
        return self.run / "2"

    def each(self) -> Sequence[str]:
        """A root, a step, items, an item, and safetensors of both kinds."""
        found = (self.run, self.step, self.items, self.items / "state", self.tensors, self.shards)
        return [str(path) for path in found]


@dataclass(frozen=True)
class Said:
    """What a command printed."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """Cells of lines."""
        return [line.split("\t") for line in self.out.splitlines()]

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """What all tests look at, and none changes."""
    folder = tmp_path_factory.mktemp("stored")
    params: dict[str, Any] = {"w": np.arange(12.0, dtype=np.float32).reshape(4, 3), "b.c": np.ones(2)}
    tree: dict[str, Any] = {
        "params": params,
        EVIL: np.full(3, np.nan),
        "name": "\x1b[31mred",
        "step": 7,
    }
    run = folder / "run"
    with penstock.sync.CheckpointManager(run) as manager:
        manager.save(0, tree, metrics={"loss": 0.75})
    for step, change in ((1, 1.0), (2, 2.0)):
        inner = {**params, "w": params["w"] + change}
        with penstock.sync.CheckpointManager(run) as manager:
            manager.save(step, {**tree, "params": inner}, metrics={"loss": 0.5 / step})

    document = run / "0" / "_CHECKPOINT_METADATA"
    document.write_bytes(document.read_bytes().replace(b"item_handlers", b"item_xandlers"))
    (run / "4.orbax-checkpoint-tmp").mkdir()
    (run / "4.orbax-checkpoint-tmp" / "d").write_bytes(bytes(100))
    items = penstock.items.Composite(state=params, about=penstock.items.Json({"a": [1, "two"]}))
    with penstock.sync.CheckpointManager(folder / "rest") as manager:
        manager.save(1, items)
    (folder / "rest" / "1").rename(folder / "items")
    shutil.rmtree(folder / "rest")
    penstock.sync.export_safetensors(params, folder / "model.safetensors")
    penstock.sync.export_safetensors(
        {"a": {"b": np.ones(5)}, "c": np.ones(5)}, folder / "shards", max_shard_bytes=40
    )
    return Stored(folder, run, folder / "items", folder / "model.safetensors", folder / "shards")


@pytest.fixture
def stored(kept: Stored, tmp_path: Path) -> Stored:
    """A copy that a test may change."""
    folder = Path(shutil.copytree(kept.folder, tmp_path / "stored"))
    return Stored(folder, folder / "run", folder / "items", folder / "model.safetensors", folder / "shards")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """Run a command as in a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: object) -> Said:
        status = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Said(status, said.out, said.err)

    return run
