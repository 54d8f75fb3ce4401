"""Hearing that the process is about to be ended."""

from __future__ import annotations

__all__ = ("awaits_preemption", "hear_sigterm")

import signal
import threading
from collections.abc import Callable

from anyio import TASK_STATUS_IGNORED, open_signal_receiver
from anyio.abc import TaskStatus

from penstock.kernel.events import get_logger
from penstock.steps.save_policies import OnPreemption, SaveAllOf, SaveAnyOf, SavePolicy


def awaits_preemption(policy: SavePolicy) -> bool:
    """Whether a policy has `OnPreemption` in it."""
    if isinstance(policy, (SaveAnyOf, SaveAllOf)):
        return any(awaits_preemption(part) for part in policy.policies)

    return isinstance(policy, OnPreemption)


async def hear_sigterm(
    told: Callable[[], object], *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED
) -> None:
    """Call `told` at each SIGTERM, which no longer ends the process, until cancelled.

    Only the main thread can hear signals; in another one nothing is heard, and that is told by an event.
    """
    if threading.current_thread() is not threading.main_thread():
        get_logger().warning("steps.no_signals", reason="not in the main thread")
        task_status.started()
        return

    with open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            told()
