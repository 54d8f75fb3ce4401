"""A place for the demo, and a way to stop it."""

from __future__ import annotations

__all__ = ("end_on_signal", "open_directory")

import shutil
import signal
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from anyio import CancelScope, open_signal_receiver

from penstock.cli.terminal import CommandError, Output
from penstock.demo.report import wrapped


@contextmanager
def open_directory(keep: Path | None, output: Output) -> Generator[Path]:
    """Yield an empty directory; name it, and remove it afterwards unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise CommandError(f"{keep} is not empty")

        yield keep
        return

    path = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    output.say(wrapped(f"Checkpoints go to {path}, which is removed at the end (--keep DIR keeps them)."))
    try:
        yield path
    finally:
        shutil.rmtree(path)
        output.say(f"Removed {path}.")


async def end_on_signal(scope: CancelScope, received: list[int]) -> None:
    """Wait for Ctrl-C or a request to end, note which, and cancel `scope`."""
    with open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            received.append(number)
            scope.cancel()
            return
