"""One process of a job that `make processes` stops or kills at a chosen point of a save."""

from __future__ import annotations

import json
import os
import signal
import sys
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
    how: str  #: "KILL" or "STOP"
    recoverable: bool

    @property
    def name(self) -> str:
        """What a folder and a row of the table are called by."""
        return f"{self.who} {self.point} {self.how} {'recoverable' if self.recoverable else 'default'}"


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
POINTS = ("join", "agree", "write", "commit", "decided", "published")


class EndingKeyValues:
    """A service whose user ends at one of its calls."""

    def __init__(self, service: Any, call: str, key: str, after: bool, end: Any) -> None:
        self._service, self._at, self._end = service, (call, key, after), end

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
        if (call, after) == (at, when) and part in key:
            self._end()


def main() -> None:
    rank, count, port, folder, fate = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
        sys.argv[5],
    )
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
        living = [other for other in range(1, count) if other != fated.who]
        while time.monotonic() < end and not all(
            (Path(folder) / f"told.{other}").exists() for other in living
        ):
            time.sleep(0.05)

    os._exit(0)  # jax waits at an ordinary exit for those who are dead


async def _take_part(rank: int, count: int, folder: Path, fate: Fate) -> Any:
    import anyio
    from tests.proofs.process_kills import HASTY, PATIENT, tree_of

    import penstock
    from penstock.handlers.coordinators.jax_key_values import JaxKeyValues
    from penstock.handlers.stores.local import LocalStore
    from penstock.kernel.coordination.job_coordinator import JobCoordinator
    from penstock.testing import FaultyStore

    run, tree = folder / "run", tree_of(count)
    async with penstock.Checkpointer(
        coordinator=JobCoordinator(JaxKeyValues(), rank, count, PATIENT)
    ) as first:
        await (await first.save(run / "step_1", tree))

    def end() -> None:
        time.sleep(BEATS * HASTY.beat_s)
        (folder / "ended").write_text(repr(time.time()))
        os.kill(os.getpid(), getattr(signal, f"SIG{fate.how}"))

    told: dict[str, Any] = {}
    service: Any = JaxKeyValues()
    store = FaultyStore(LocalStore())
    is_own = rank == fate.who
    points = PRIMARY_AT if rank == 0 else OTHERS_AT
    if is_own and fate.point in points:
        service = EndingKeyValues(service, *points[fate.point], end)

    hang = store.hang_on("data.write_at") if is_own and fate.point == "write" else None
    coordinator = JobCoordinator(service, rank, count, HASTY)
    async with (
        penstock.Checkpointer(coordinator=coordinator, store=store) as second,
        anyio.create_task_group() as tasks,
    ):
        if is_own and fate.point == "join":
            await anyio.to_thread.run_sync(end)
        if hang is not None:

            async def end_in_the_write() -> None:
                await hang.wait_reached()
                await anyio.to_thread.run_sync(end)
                hang.release()

            tasks.start_soon(end_in_the_write)

        try:
            await (await second.save(run / "step_2", tree))
        except penstock.errors.PenstockError as error:
            told = {
                "told": type(error).__name__,
                "processes": list(getattr(error, "processes", ())),
                "stage": getattr(error, "peer_stage", None),
                "text": str(error),
            }
        else:
            told = {"told": "saved"}

        tasks.cancel_scope.cancel()

    ended = folder / "ended"
    return {**told, "after_s": time.time() - float(ended.read_text()) if ended.exists() else None}


if __name__ == "__main__":
    main()
