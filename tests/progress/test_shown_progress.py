"""`progress=` on saves and restores: functions, bars, and silence where nobody looks."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tests.event_loops import ASYNCIO

import penstock
from penstock.errors import SpecError

TREE = {"a": np.arange(1000, dtype="f4"), "b": np.ones((3, 5))}
NBYTES = 4120
Seen = list[tuple[int, int]]


class Terminal(io.StringIO):
    """What is written to it stays; it calls itself a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr. Not a fixture: pytest sets stderr anew before it calls the test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def check_course(seen: Seen) -> None:
    assert seen[0] == (0, NBYTES)
    assert seen[-1] == (NBYTES, NBYTES)
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {NBYTES}


async def test_a_progress_function_is_called_with_bytes(tmp_path: Path) -> None:
    saved: Seen = []
    restored: Seen = []
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "x", TREE, progress=lambda *at: saved.append(at)))
        await checkpointer.restore(tmp_path / "x", progress=lambda *at: restored.append(at))

    check_course(saved)
    check_course(restored)


async def test_a_function_that_fails_is_asked_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: Seen = []

    def fail(done: int, total: int) -> None:
        calls.append((done, total))
        raise ValueError("no more of this")

    await penstock.save(tmp_path / "x", TREE, progress=fail)

    assert calls == [(0, NBYTES)]
    assert [each.message for each in caplog.records if "progress.failed" in each.message]
    assert (await penstock.restore(tmp_path / "x"))["b"].shape == (3, 5)


@pytest.mark.parametrize("library", ["tqdm", "rich"])
@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"], scope="module")
async def test_a_bar_by_name(
    library: Literal["tqdm", "rich"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library, reason=f"draws the bar: pip install {library}")
    stream = io.StringIO()  # no terminal: a name asks for the bar wherever it goes
    monkeypatch.setattr(sys, "stderr", stream)

    await penstock.save(tmp_path / "step_7", TREE, progress=library)
    saved = stream.getvalue()
    await penstock.restore(tmp_path / "step_7", progress=library)

    assert "save step_7" in saved
    assert "4.12k/4.12k" in saved or "4.1/4.1 kB" in saved
    assert "restore step_7" in stream.getvalue()[len(saved) :]


async def test_true_is_silent_where_nobody_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich", reason="draws the bar: pip install rich")
    await penstock.save(tmp_path / "x", TREE, progress=True)

    assert capsys.readouterr() == ("", "")


async def test_true_draws_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="draws the bar: pip install rich")
    stream = terminal(monkeypatch)
    await penstock.save(tmp_path / "x", TREE, progress=True)

    assert "save x" in stream.getvalue()


async def test_a_failed_restore_ends_its_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm", reason="draws the bar: pip install tqdm")
    stream = terminal(monkeypatch)
    with pytest.raises(penstock.errors.NotACheckpointError):
        await penstock.restore(tmp_path / "x", progress="tqdm")

    assert "restore x" in stream.getvalue()
    assert stream.getvalue().endswith("\n")


async def test_what_cannot_be_shown_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="progress must be True, False, 'rich', 'tqdm' or a function"):
        await penstock.save(tmp_path / "x", TREE, progress="bar")  # type: ignore[arg-type]

    assert not (tmp_path / "x").exists()


async def test_progress_is_reported_for_each_item(tmp_path: Path) -> None:
    seen: Seen = []
    await penstock.save(tmp_path / "x", penstock.Composite(one=TREE, two={"c": np.ones(2)}))
    await penstock.restore_items(tmp_path / "x", progress=lambda *at: seen.append(at))

    assert (NBYTES, NBYTES) in seen
    assert (16, 16) in seen


def test_managers_and_plain_scripts_show_progress(tmp_path: Path) -> None:
    saved: Seen = []
    restored: Seen = []
    with penstock.sync.CheckpointManager(tmp_path) as manager:
        save = manager.save(1, TREE, progress=lambda *at: saved.append(at))
        assert save is not None
        save.result()
        manager.restore(progress=lambda *at: restored.append(at))

    check_course(saved)
    check_course(restored)
