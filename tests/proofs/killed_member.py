"""One process of a job that `make processes` ends, or lets fail, at a chosen point of a save."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

LEAVE_S = 20.0
BEATS = 3  #: so many of them before the end, so that all have heard where it is


@dataclass(frozen=True)
class Fate:
    """Who is ended, where, and how."""

    who: int
    point: str
    how: str  #: one of `POINTS`
    recoverable: bool

    @property
    def name(self) -> str:
        """What a folder and a row of the table are called by."""
        return f"{self.who} {self.point} {self.how} {'recoverable' if self.recoverable else 'default'}"

    @property
    def lives(self) -> bool:
        """Whether the process goes on, and saves again."""
        return self.how not in ("KILL", "STOP")


PRIMARY_AT: Mapping[
    str, tuple[str, str, bool]
] = {  # the call of the service, part of its key, and whether after it
    "agree": ("wait", "/plan_here", False),
    "commit": ("wait", "/part_here", False),
    "decided": ("put", "/verdict", True),
    "published": ("put", "/result", False),
}
OTHERS_AT: Mapping[str, tuple[str, str, bool]] = {
    "agree": ("put", "/plan/", False),
    "commit": ("put", "/part/", False),
    "decided": ("wait", "/result", False),
}
ENDED_AT = ("join", "agree", "write", "commit", "decided", "published")
POINTS: Mapping[str, tuple[str, ...]] = {
    "KILL": ENDED_AT,
    "STOP": ENDED_AT,
    "RAISE": ("call", "plan", "agree", "write", "commit", "publish"),
    "CANCEL": ("agree", "write", "commit"),
    "DIFFER": ("leaf", "option"),
}
FAILS_IN = {"write": "data.write_at", "publish": "publish"}
ONLY_PRIMARY = ("published", "publish")


class EndingKeyValues:
    """A service whose user ends at one of its calls."""

    def __init__(self, service: Any, call: str, key: str, after: bool, end: Any) -> None:
        self._service, self._at, self._end = service, (call, key, after), end
        self._is_over = False

    def put(self, key: str, value: bytes, replace: bool, /) -> bool:
        self._look("put", key, False)
        found: bool = self._service.put(key, value, replace)
        self._look("put", key, True)
        return found

    def wait(self, key: str, timeout_s: float, /) -> bytes | None:
        self._look("wait", key, False)
        found: bytes | None = self._service.wait(key, timeout_s)
        return found

    def under(self, prefix: str, /) -> Mapping[str, bytes]:
        found: Mapping[str, bytes] = self._service.under(prefix)
        return found

    def count(self, key: str, /) -> int:
        found: int = self._service.count(key)
        return found

    def delete(self, prefix: str, /) -> None:
        self._service.delete(prefix)

    def _look(self, call: str, key: str, after: bool) -> None:
        at, part, when = self._at
        if (call, after) == (at, when) and part in key and not self._is_over:
            self._is_over = True
            self._end()


def main() -> None:
    rank, count = map(int, sys.argv[1:3])
    port, folder, fate = sys.argv[3:]
    jax: Any = import_module("jax")
    fated = Fate(**json.loads(fate))
    jax.config.update("jax_enable_recoverability", fated.recoverable)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, coordinator_bind_address=f"127.0.0.1:{port}")
    import anyio

    told = anyio.run(_take_part, rank, count, Path(folder), fated)
    part = Path(folder) / f"told.{rank}.part"
    part.write_text(json.dumps(told))
    part.rename(part.with_suffix(""))
    if rank == 0:  # the service goes with it
        end = time.monotonic() + LEAVE_S
        living = [other for other in range(1, count) if other != fated.who or fated.lives]
        while time.monotonic() < end and not all(
            (Path(folder) / f"told.{other}").exists() for other in living
        ):
            time.sleep(0.05)

    os._exit(0)  # jax waits at an ordinary exit for those who are dead


async def _take_part(rank: int, count: int, folder: Path, fate: Fate) -> Any:
    import anyio
    from tests.proofs.process_kills import HASTY, PATIENT, tree_of

    import penstock
    from penstock.handlers import LocalStore
    from penstock.handlers.coordinators.jax_key_values import JaxKeyValues
    from penstock.handlers.coordinators.job_coordinator import JobCoordinator
    from penstock.testing import FaultyStore

    run, tree = folder / "run", tree_of(count)
    async with penstock.Checkpointer(
        coordinator=JobCoordinator(JaxKeyValues(), rank, count, PATIENT)
    ) as first:
        await (await first.save(run / "step_1", tree))

    told: dict[str, Any] = {}
    own = _Own(fate, folder) if rank == fate.who else None
    service: Any = JaxKeyValues()
    store = FaultyStore(LocalStore())
    points = PRIMARY_AT if rank == 0 else OTHERS_AT
    if own is not None and fate.point in points:
        service = EndingKeyValues(service, *points[fate.point], own.end)
    if own is not None and fate.how == "RAISE" and fate.point in FAILS_IN:
        store.fail_on(FAILS_IN[fate.point])

    hangs = own is not None and fate.point == "write" and fate.how != "RAISE"
    hang = store.hang_on("data.write_at") if hangs else None
    async with (
        penstock.Checkpointer(coordinator=JobCoordinator(service, rank, count, HASTY), store=store) as second,
        anyio.create_task_group() as tasks,
    ):
        if own is not None and fate.point == "join":
            await anyio.to_thread.run_sync(own.end)
        if own is not None and hang is not None:

            async def end_in_the_write() -> None:
                await hang.wait_reached()
                await anyio.to_thread.run_sync(own.end)
                hang.release()

            tasks.start_soon(end_in_the_write)

        told = await _told(second, run / "step_2", tree, own)
        if fate.lives:
            told["again"] = await _told(second, run / "step_2", tree, None)

        tasks.cancel_scope.cancel()

    return told


async def _told(checkpointer: Any, path: Path, tree: Any, own: _Own | None) -> dict[str, Any]:
    """Save; return what came of it, and how long after the end of the one whose fate it is."""
    from penstock.errors import PenstockError

    folder = path.parents[1]
    options: dict[str, Any] = {}
    if own is not None:
        tree, options = own.asked(tree)
    try:
        save = await checkpointer.save(path, tree, **options)
        if own is not None:
            own.save = save

        await save
    except PenstockError as error:
        told: dict[str, Any] = {
            "told": type(error).__name__,
            "processes": list(getattr(error, "processes", ())),
            "stage": getattr(error, "peer_stage", None),
            "text": str(error),
        }
    else:
        told = {"told": "saved"}

    ended = folder / "ended"
    return {**told, "after_s": time.time() - float(ended.read_text()) if ended.exists() else None}


class _Own:
    """What the process does whose fate it is."""

    def __init__(self, fate: Fate, folder: Path) -> None:
        self._fate, self._folder = fate, folder
        self.save: Any = None

    def end(self) -> None:
        """Meet the fate. In a worker thread."""
        from tests.proofs.process_kills import HASTY

        from penstock.errors import CoordinationError

        fate = self._fate
        if not fate.lives:
            time.sleep(BEATS * HASTY.beat_s)

        self._note()
        if fate.how == "CANCEL":
            while self.save is None:
                time.sleep(0.01)

            self._note()
            self.save.cancel()
            time.sleep(HASTY.beat_s)  # until then the call does not come back
        elif fate.how == "RAISE":
            raise CoordinationError("the service is out of order")
        else:
            # To this thread: another may take one for the process, and this one goes on.
            signal.pthread_kill(threading.get_ident(), getattr(signal, f"SIG{fate.how}"))

    def asked(self, tree: Any) -> tuple[Any, dict[str, Any]]:
        """Return what is to be saved, and the options, if these are what is wrong."""
        match self._fate.how, self._fate.point:
            case "RAISE", "call":
                self._note()
                return tree, {"compare": "by heart"}
            case "RAISE", "plan":
                self._note()
                return {**tree, "bad": object()}, {}
            case "RAISE", ("write" | "publish"):
                self._note()
            case "DIFFER", "leaf":
                self._note()
                return {**tree, "more": 1}, {}
            case "DIFFER", "option":
                self._note()
                return tree, {"custom_metadata": {"a": 1}}
            case _:
                pass

        return tree, {}

    def _note(self) -> None:
        part = self._folder / "ended.part"
        part.write_text(repr(time.time()))
        part.rename(self._folder / "ended")


if __name__ == "__main__":
    main()
