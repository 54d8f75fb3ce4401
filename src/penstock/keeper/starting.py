"""Starts the keeper of this host and user, unless there is one."""

from __future__ import annotations

__all__ = ("IDLE_S", "ensure_keeper")

import os
import sys
from subprocess import DEVNULL, PIPE
from typing import Final, Literal

from anyio import current_time, run_process, sleep

from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.keeper.messages import StatusAnswer
from penstock.keeper.process import IS_RUNNING, arguments
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import KeeperLostError

IDLE_S: Final = 600.0
"""So long a keeper that was started by a training waits for the next one."""

_LOOK_S: Final = 0.02


async def ensure_keeper(
    socket: str | None = None,
    *,
    limit_bytes: int | Literal["auto"] = "auto",
    idle_s: float = IDLE_S,
    within_s: float = 10.0,
) -> StatusAnswer:
    """Return the status of this user's keeper, which is started if there is none.

    It has its own session and none of our descriptors, and outlives this process. Of several that start
    one at once, one succeeds, and all get the same.

    Args:
        socket: Where it listens; None for the usual place.
        limit_bytes: The most memory that its files may take; "auto" for half of what is free. One that runs
            already keeps its own.
        idle_s: After so many seconds without a client it ends, unless it holds what no other tier has.
        within_s: How long it may take until it answers.

    Raises:
        KeeperLostError: If it cannot be started, or does not answer in time.
        ConfigError: If there are no keepers on this system.

    Cancellation:
        At once. A keeper that has been started goes on.
    """
    store, threads = KeeperStore(socket, answer_s=within_s), Threads(1)
    deadline = current_time() + within_s
    try:
        while True:
            try:
                return await threads.run(store.status)
            except KeeperLostError as lost:
                if current_time() >= deadline or not lost.is_absent:
                    raise

            await _start(store.socket, limit_bytes, idle_s)
            await sleep(_LOOK_S)
    finally:
        store.close()


async def _start(socket: str, limit_bytes: int | Literal["auto"], idle_s: float) -> None:
    given = arguments(socket, None if limit_bytes == "auto" else limit_bytes, idle_s, detached=True)
    started = await run_process(
        [sys.executable, "-P", "-m", "penstock.keeper", *given],
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        check=False,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if started.returncode not in {0, IS_RUNNING}:
        said = started.stderr.decode(errors="replace").strip().splitlines()
        problem = said[-1] if said else f"it ended with status {started.returncode}"
        raise KeeperLostError(socket, f"it cannot be started: {problem}")
