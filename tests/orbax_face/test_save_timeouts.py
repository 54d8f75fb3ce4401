"""Saves that take too long."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

import penstock.orbax


def test_a_save_that_takes_too_long_fails_on_time_and_is_removed_later(tmp_path: Path) -> None:
    go_on = threading.Event()

    class Slow(penstock.orbax.AsyncCheckpointHandler):
        async def async_save(self, directory: Any, args: Any = None, **kwargs: Any) -> Any:
            (directory / "part").write_text("half")
            return [penstock.orbax.future.CommitFutureAwaitingContractedSignals(self._write())]

        async def _write(self) -> None:
            go_on.wait()

        def save(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

        def restore(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

    checkpointer = penstock.orbax.AsyncCheckpointer(Slow(), timeout_secs=1)
    begun = time.monotonic()
    checkpointer.save(tmp_path / "slow", 1)
    with pytest.raises(TimeoutError):
        checkpointer.wait_until_finished()

    assert time.monotonic() - begun < 20
    go_on.set()
    checkpointer.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_handler_does_at_the_end_counts_for_the_timeout(tmp_path: Path) -> None:
    finalized: list[str] = []

    class Late(penstock.orbax.AsyncCheckpointHandler):
        async def async_save(self, directory: Any, args: Any = None, **kwargs: Any) -> None:
            (directory / "part").write_text("all")

        def save(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

        def restore(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

        def finalize(self, directory: Any) -> None:
            finalized.append(directory.name)

    checkpointer = penstock.orbax.AsyncCheckpointer(Late(), timeout_secs=cast("int", 1e-9))
    checkpointer.save(tmp_path / "late", 1)
    with pytest.raises(TimeoutError, match="Timed out after 1e-09 seconds"):
        checkpointer.wait_until_finished()

    checkpointer.close()
    assert len(finalized) == 1
    assert list(tmp_path.iterdir()) == []
