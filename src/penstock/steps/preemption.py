"""SIGTERM as a request to save before the process is ended."""

from __future__ import annotations

__all__ = ("hear_sigterm",)

import signal
import threading
from collections.abc import Callable

from anyio import TASK_STATUS_IGNORED, open_signal_receiver
from anyio.abc import TaskStatus

from penstock.kernel.events import get_logger


async def hear_sigterm(
    told: Callable[[], object], *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED
) -> None:
    """Call `told` at each SIGTERM, which no longer ends the process, until cancelled.

    Python handles signals in the main thread only. In another thread this logs an event and returns.
    """
    if threading.current_thread() is not threading.main_thread():
        get_logger().warning("steps.no_signals", reason="not in the main thread")
        task_status.started()
        return

    with open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            told()
