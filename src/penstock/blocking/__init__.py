"""The one bridge between blocking callers and event loops: threads, loops in threads, and the sync face.

Each name is fetched from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "LoopHandle",
    "LoopThread",
    "Worker",
    "await_future",
    "caller_waits",
    "in_event_loop",
    "run_sync",
    "start_loop",
    "start_thread",
    "together",
)

if TYPE_CHECKING:
    from penstock.blocking.background import Worker, run_sync, start_loop, start_thread
    from penstock.blocking.loop_thread import LoopThread
    from penstock.kernel.concurrency.threads import LoopHandle, await_future, caller_waits, in_event_loop
    from penstock.kernel.pipeline.together import together
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.blocking.background": ("Worker", "run_sync", "start_loop", "start_thread"),
            "penstock.blocking.loop_thread": ("LoopThread",),
            "penstock.kernel.concurrency.threads": (
                "LoopHandle",
                "await_future",
                "caller_waits",
                "in_event_loop",
            ),
            "penstock.kernel.pipeline.together": ("together",),
        },
    )
