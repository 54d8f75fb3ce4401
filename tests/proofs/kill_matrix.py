"""Kills each of those that keep a step at each question that a keeper is asked. `make tiers-proof`.

Two processes on two hosts save one step after another into memory, with a peer, into disks and a root. A
relay before the keeper of the second host waits for one kind of question, and kills there, before it is asked
or once it is answered,

* `trainer`: the process that is on this host,
* `keeper`: the keeper itself; the job goes on,
* `both`,
* `peer`: the other host, with its process.

Then the next job must find what `tests.proofs.tiers` says. The questions are listed here. A run in which
nobody is killed must ask these and no others, and each must come when it is waited for: none is left out.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Literal

from tests.keeper.relay import Relay, When
from tests.proofs.crash_loop import fork
from tests.proofs.tier_hosts import Services, end_with_parent
from tests.proofs.tiers import Round, World, import_all

from penstock.handlers.stores.keeper.messages import (
    Head,
    Move,
    Prepare,
    Release,
    Request,
    Status,
    TakeOver,
    decode_request,
)

Victim = Literal["trainer", "keeper", "both", "peer"]
VICTIMS: Final[Sequence[Victim]] = ("trainer", "keeper", "both", "peer")
POINTS: Final = (
    "create",
    "finish",
    "get",
    "hold",
    "list",
    "look",
    "make directory",
    "make held",
    "note elsewhere",
    "publish",
    "put",
    "remove",
    "rename",
    "reserve",
    "room",
    "share",
    "of a peer: create",
    "of a peer: hold",
    "of a peer: list",
    "of a peer: make directory",
    "of a peer: make held",
    "of a peer: note elsewhere",
    "of a peer: publish",
    "of a peer: put",
    "of a peer: remove",
    "of a peer: rename",
)
"""Of a save, its promotion, its deletion, and the copy that a peer is sent."""

HERE: Final = 1
"""The process, and the host, whose keeper the relay is before."""

STRIKES_S: Final = 60.0


def words_of(kind: type[object]) -> str:
    """Return the name of a kind of question in words."""
    return "".join([f" {each.lower()}" if each.isupper() else each for each in kind.__name__]).strip()


def point_of(request: Request) -> str | None:
    """Return which point of the protocol a question is; None for what is asked on opening or leaving."""
    if isinstance(request, Prepare | Release | Status | TakeOver):
        return None

    words = words_of(type(request))
    if isinstance(request, Move):
        words = "publish" if request.publishes else "rename"

    path = getattr(request, "path", "") or getattr(request, "destination", "")
    is_of_peer = path.startswith("process/") and not path.startswith(f"process/{HERE}/")
    return f"of a peer: {words}" if is_of_peer else words


class Strikes:
    """What the relay, a process of its own, is to do, and has seen. Both sides see one memory.

    Args:
        door: Where the relay listens.
        keeper: The keeper's socket.
        log: A file for what is none of `POINTS`.
    """

    _ARMED = struct.Struct(
        "<iiiii"
    )  # the point, or -1; 1 if after it; two processes to kill; 1 if it is done

    def __init__(self, door: str, keeper: str, log: Path) -> None:
        self._shared = mmap.mmap(-1, self._ARMED.size + len(POINTS))
        self._log = log
        self._set(-1, 0, 0, 0, 0)
        read, write = os.pipe()
        self._process = fork(lambda out: self._serve(door, keeper, out), write)
        os.close(write)
        with os.fdopen(read) as told:
            told.readline()

    @property
    def seen(self) -> set[str]:
        """The points that have come so far."""
        return {point for at, point in enumerate(POINTS) if self._shared[self._ARMED.size + at]}

    @property
    def unknown(self) -> set[str]:
        """What came, and is none of them."""
        return set(self._log.read_text().splitlines()) if self._log.exists() else set()

    def arm(self, point: str, when: When, processes: Sequence[int]) -> None:
        """Kill these processes when a point comes."""
        one, other = (*processes, 0)[:2]
        self._set(POINTS.index(point), int(when == "after"), one, other, 0)

    @property
    def is_done(self) -> bool:
        """True once they are killed."""
        return bool(self._get()[4])

    def close(self) -> None:
        """End the relay."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def _serve(self, door: str, keeper: str, out: int) -> None:
        end_with_parent()
        relay = Relay(door, keeper, self._watch)
        self._relay = relay
        os.write(out, b"ready\n")
        os.close(out)
        signal.pause()

    def _watch(self, message: bytes) -> None:
        point = point_of(decode_request(message[Head.nbytes :]))
        if point is None:
            return
        if point not in POINTS:
            with open(self._log, "a") as log:
                log.write(f"{point}\n")

            return

        at = POINTS.index(point)
        self._shared[self._ARMED.size + at] = 1
        armed, is_after, one, other, is_done = self._get()
        if armed != at or is_done:
            return

        self._set(-1, is_after, one, other, 0)
        self._relay.strike_at(1, "after" if is_after else "before", self._strike)  # at this one

    def _strike(self) -> None:
        _, is_after, *processes, _ = self._get()
        for process in filter(None, processes):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

        self._set(-1, is_after, 0, 0, 1)

    def _get(self) -> tuple[int, int, int, int, int]:
        return self._ARMED.unpack(self._shared[: self._ARMED.size])

    def _set(self, *values: int) -> None:
        self._shared[: self._ARMED.size] = self._ARMED.pack(*values)


class Quiet(Round):
    """A job in which nobody is killed, until it has come to all points."""

    def __init__(self, world: World, rng: random.Random, strikes: Strikes) -> None:
        super().__init__(world, 0, rng, (0, 1), 1)
        self._strikes = strikes

    def _nobody(self) -> None:
        until = time.monotonic() + STRIKES_S
        while not self._strikes.seen.issuperset(POINTS) and time.monotonic() < until:
            self._goes_on(1)  # a step is removed once its copies are where they go, which takes some more


class Strike(Round):
    """A job in which somebody is killed at a point of the protocol.

    Args:
        world: Where.
        number: Of the job.
        rng: Chooses.
        strikes: At the keeper.
        cell: Who is killed, at which point, and when.
    """

    def __init__(
        self, world: World, number: int, rng: random.Random, strikes: Strikes, cell: tuple[Victim, str, When]
    ) -> None:
        super().__init__(world, number, rng, (0, 1), 1)
        self._strikes, self._cell = strikes, cell

    def _strike(self) -> None:
        victim, point, when = self._cell
        for job in self._jobs:
            job.hear("sent")

        at = 1 - HERE if victim == "peer" else HERE
        trainer, keeper = self._jobs[at].process, self._world.hosts[at].keeper_process
        killed = {"trainer": [trainer], "keeper": [keeper]}.get(victim, [trainer, keeper])
        self._strikes.arm(point, when, killed)
        until = time.monotonic() + STRIKES_S
        while not self._strikes.is_done:
            assert time.monotonic() < until, f"{point!r} did not come within {STRIKES_S} s"
            time.sleep(0.005)

        if keeper in killed:
            self._world.hosts[at].lose_keeper()
            self._lost.keepers.add(at)
        if trainer in killed:
            self._jobs[at].kill()
        if victim == "peer":
            self._world.hosts[at].lose()
            self._lost.disks.add(at)
        if victim == "keeper":
            self._goes_on(2)


def main(given: Sequence[str] | None = None) -> int:
    """Kill everybody at every point; return 0, or raise at the first job that does not find what it must."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--victims", nargs="*", default=list(VICTIMS), choices=VICTIMS)
    parser.add_argument("--points", nargs="*", default=list(POINTS), choices=POINTS)
    parser.add_argument("--when", nargs="*", default=["before", "after"], choices=["before", "after"])
    options = parser.parse_args(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and leave nothing
    with ExitStack() as stack:
        made = Path(tempfile.mkdtemp(prefix="pk-", dir="/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"))
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        import_all(made)
        services = Services(made)
        stack.callback(services.close)
        world = World(made, str(made / "root"), None, 10, services, None, (2, 2))
        stack.callback(world.close)
        host = world.hosts[HERE]
        strikes = Strikes(door := str(made / "door"), host.socket, made / "unknown")
        stack.callback(strikes.close)
        host.door = door
        rng = random.Random(1)
        Quiet(world, rng, strikes).run("nobody")
        missing = set(POINTS) - strikes.seen
        assert not missing | strikes.unknown, f"no save came to {missing}; not listed: {strikes.unknown}"
        cells = [(v, p, w) for v in options.victims for p in options.points for w in options.when]
        for number, cell in enumerate(cells, 1):
            try:
                Strike(world, number, rng, strikes, cell).run("strike")
            except AssertionError as failure:
                failure.add_note(f"killed: {cell}")
                raise

            sys.stdout.write(f"{' '.join(cell[::2])}: {cell[1]}\n")
            sys.stdout.flush()

    sys.stdout.write(f"{len(cells)} kills at {len(options.points)} points\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
