"""Kills processes that save, follow and delete, again and again, and looks at what they left. `make crash`.

Some processes work in one folder: one saver; or several that overwrite one path; or two whose saves are
linked to each other's checkpoints; or two managers, each with a follower; or the same with Orbax's names.
They say what they do. The parent kills some of them (SIGKILL) at a random moment and the others a little
later, and then demands that

* every save that was reported durable is there, unless one that began later replaced or deleted it,
* whatever is visible under its own name is whole and holds one state, never a mixture,
* no process failed, and no follower ever saw anything else.

Every round begins from what the one before left, so leftovers of a kill must not hinder the next. Processes
are forked from the parent, which has imported everything and runs no thread. So a kill costs little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import anyio
from tests.proofs.crash_roles import SCENES, Line, Memory, Role, Say, Scene, left_temporary

LOADED = ("jax", "penstock.checkpointer.checkpointer", "penstock.handlers.leaves.default_handlers")
"""Imported by the parent, so that no child has to."""
ROUND_S = 20.0
"""Seconds in which the processes must say something."""


def fork(work: Callable[[int], None], out: int) -> int:
    """Do some work in another process, with a descriptor to write to; return its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax and Python warn of threads; there are none
        child = os.fork()
    if child:
        return child

    status = 1
    try:
        work(out)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def play(role: Role, folder: Path, who: str, number: int) -> Callable[[int], None]:
    """Return the work of a process that plays a role."""

    def work(out: int) -> None:
        def say(what: str, number: int) -> None:
            os.write(out, f"{who} {what} {number}\n".encode())  # one write, so that lines are in order

        told: Say = say
        anyio.run(role, folder, told, number)

    return work


class Round:
    """Some processes, until all of them are killed."""

    def __init__(self, scene: Scene, folder: Path, rng: random.Random, number: int) -> None:
        self._rng = rng
        self._read, out = os.pipe()
        self._text = b""
        self.children: dict[int, str] = {}
        for at, (who, role) in enumerate(scene.roles(rng).items()):
            self.children[fork(play(role, folder, who, number + 1000 * at), out)] = who

        os.close(out)

    def run(self) -> list[Line]:
        """Let them work for a while, kill all of them, and return what they said.

        Raises:
            AssertionError: If one of them ended by itself, or all say nothing.
        """
        n_lines = self._rng.randrange(1, 4 * len(self.children) + 3)
        until = time.monotonic() + ROUND_S
        while self._text.count(b"\n") < n_lines and self._hear(until - time.monotonic()):
            pass

        time.sleep(self._rng.random() * 0.1)  # the moment of the kill is what is random here
        order = self._rng.sample(list(self.children), len(self.children))
        first = self._rng.randrange(1, len(order) + 1)
        self._kill(order[:first])
        if order[first:]:
            time.sleep(self._rng.random() * 0.2)  # the others go on beside what the first ones left
            self._kill(order[first:])
        while self._hear(ROUND_S):
            pass

        os.close(self._read)
        return [
            Line(who, what, int(number))
            for who, what, number in map(str.split, self._text.decode().splitlines())
        ]

    def _hear(self, seconds: float) -> bool:
        """Read what they say; return whether more may come."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, seconds))
        assert ready, f"nobody said anything: {self._text.decode()}"
        found = os.read(self._read, 65536)
        self._text += found
        return bool(found)

    def _kill(self, children: Sequence[int]) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (
                f"{self.children[child]} ended by itself"
            )


def examine(scene: Scene, folder: Path, lines: Sequence[Line], memory: Memory) -> tuple[Memory, Counter[str]]:
    """Check in another process, so that this one runs no thread, what the processes left.

    Raises:
        AssertionError: If something is wrong; what is written on stderr.
    """
    read, write = os.pipe()

    def work(out: int) -> None:
        found = Counter[str]()
        anyio.run(scene.check, folder, lines, memory, found)
        with os.fdopen(out, "w") as file:
            json.dump([memory.at, memory.durable, found], file)

    child = fork(work, write)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()

    _, status = os.waitpid(child, 0)
    assert status == 0, f"see {folder}; said were {lines}"
    at, durable, found = json.loads(text)
    return Memory(at, durable), Counter(found)


def main() -> None:
    """Parse the command line, kill, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--scenes", nargs="*", default=list(SCENES), choices=list(SCENES))
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    for name in LOADED:
        import_module(name)

    rng = random.Random(options.seed)
    found: Counter[str] = Counter()
    memories = {name: Memory() for name in options.scenes}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-crash-", ignore_cleanup_errors=True) as place:
        for name in options.scenes:
            Path(place, name).mkdir()

        for kill in range(options.kills):
            name = options.scenes[kill % len(options.scenes)]
            scene, folder = SCENES[name], Path(place, name)
            killed = Round(scene, folder, rng, 10_000 * (kill + 1))
            lines = killed.run()
            found[f"kills: {name}"] += 1
            found["processes killed"] += len(killed.children)
            found["kills that left a temporary directory"] += left_temporary(folder)
            for line in lines:
                found[f"saves {line.what}" if line.what != "followed" else "states followed"] += 1

            memories[name], more = examine(scene, folder, lines, memories[name])
            found += more
            if (kill + 1) % 10 == 0:
                sys.stdout.write(f"{kill + 1} kills survived, {time.monotonic() - begun:.0f} s\n")
                sys.stdout.flush()

    for what, times in sorted(found.items()):
        sys.stdout.write(f"{times:7} {what}\n")


if __name__ == "__main__":
    main()
