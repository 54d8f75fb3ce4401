"""What is different in a notebook: a loop runs there that a cell blocks anyway, and nothing has a `with`."""

from __future__ import annotations

__all__ = ("in_shell", "is_cell")

import sys
from inspect import currentframe
from types import FrameType
from typing import Any, cast

from anyio.lowlevel import EventLoopToken


def in_shell() -> bool:
    """Whether this process is an interactive IPython: a notebook's kernel, or one in a terminal."""
    return _shell() is not None


def is_cell(loop: EventLoopToken) -> bool:
    """Whether the caller is code of a cell, and `loop`, which runs here, is that of IPython's kernel.

    A kernel runs each cell to its end before it looks at its loop again, so a call that blocks there delays
    nothing that would not wait for the cell anyway. A task that a cell has started is no cell.
    """
    shell = _shell()
    kernel = getattr(shell, "kernel", None)
    if kernel is None or loop.native_token is not getattr(kernel.io_loop, "asyncio_loop", None):
        return False

    running: object = cast("Any", type(shell)).run_code.__code__
    frame: FrameType | None = currentframe()
    while frame is not None and frame.f_code is not running:
        frame = frame.f_back

    return frame is not None


def _shell() -> Any:
    """Return IPython's shell; None if this process has none. Imports nothing."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
