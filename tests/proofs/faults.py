"""Every power loss in every kind of save, link, overwrite and deletion, for every layout. `make faults`.

Each course is done once, on a store that records it. Then the power is lost after each of its effects on the
disk, in many ways: what was not synced is there, or not, or in part. What is left is written to a folder and
looked at: of each checkpoint, the previous or the new state must be restored, to the last bit; one that was
reported durable must be there; and the next save must work and leave nothing behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from operator import add
from pathlib import Path
from typing import Any

import anyio
from tests.memory_folder import MEMORY
from tests.proofs.recorded_courses import COURSES, LAYOUTS, Numbers, Recording, pairs
from tests.proofs.traced_courses import ARRAYS, ORBAX_COURSES, trace

from penstock import Checkpointer
from penstock.errors import PenstockError
from penstock.testing import PowerLoss
from penstock.testing.volatile_disk import Content, FileLeft

NEXT = 9
"""The number of the save that follows each power loss."""


@dataclass
class Found:
    """What the power losses in one course left."""

    n_prefixes: int = 0
    n_losses: int = 0  #: different contents that were looked at
    states: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])

    def row(self) -> list[int]:
        """The numbers of the table."""
        kinds = ("previous", "new", "MIXED", "LOST", "STUCK")
        return [self.n_prefixes, self.n_losses, *(self.states[kind] for kind in kinds)]


class Course:
    """A course on one layout: records it, then looks at what each power loss leaves.

    Args:
        folder: Empty.
        kind: The name of the course.
        layout: The name of the layout.
        limit: How many choices of lost names are tried after each effect.
        traced: Whether it is recorded by its system calls, in another process.
        every: Looks only at each so manieth content, and at those that differ in more than temporary files.
    """

    def __init__(
        self, folder: Path, kind: str, layout: str, *, limit: int = 32, every: int = 1, traced: bool = False
    ) -> None:
        self._folder = folder
        self._kind = kind
        self._layout = layout
        self._traced = traced
        self._storing = ARRAYS if kind in ORBAX_COURSES else LAYOUTS[layout]
        self._limit = limit
        self._every = every
        self._found = Found()

    async def run(self) -> Found:
        """Record the course and look at every power loss."""
        place = self._folder / "recorded"
        if self._traced:
            recording: Recording = await trace(self._kind, self._layout, place)
        else:
            place.mkdir()
            recording = Recording(place, self._storing)
            await COURSES[self._kind](recording)

        self._found.n_prefixes = recording.n_effects + 1
        seen: set[tuple[Content, str]] = set()
        shown: set[tuple[Content, str]] = set()
        async with recording.checkpointer() as checkpointer:
            for loss in recording.power_losses(self._limit):
                allowed = recording.at(loss.n_effects)
                as_allowed = repr(sorted(allowed.items()))
                if (loss.content, as_allowed) in seen:
                    continue

                seen.add((loss.content, as_allowed))
                finished = _finished(loss.content), as_allowed
                if finished not in shown or len(seen) % self._every == 0:
                    shown.add(finished)
                    await self._look(checkpointer, loss, allowed, recording.replaced_by)

        return self._found

    async def _look(
        self,
        checkpointer: Checkpointer,
        loss: PowerLoss,
        allowed: dict[str, Numbers],
        replaced_by: dict[str, str],
    ) -> None:
        self._found.n_losses += 1
        folder = self._folder / str(self._found.n_losses)
        loss.write(folder)
        recording = Recording(folder, self._storing)
        try:
            if "new" in allowed:
                await self._look_at_paths(recording, checkpointer, allowed)
            else:
                await self._look_at_steps(recording, allowed, replaced_by)
        except _Problem as problem:
            self._found.states[problem.kind] += 1
            self._found.problems.append(f"effect {loss.n_effects}, see {folder}: {problem.kind}, {problem}")
        else:
            shutil.rmtree(folder)

    async def _look_at_paths(
        self, recording: Recording, checkpointer: Checkpointer, allowed: dict[str, Numbers]
    ) -> None:
        numbers: dict[str, int | None] = {}
        for name, may_be in allowed.items():
            path = recording.folder / name
            numbers[name] = await self._number(recording, checkpointer, path) if path.exists() else None
            _check(name, numbers[name], may_be)

        self._note(numbers["new"] == max(number or 0 for number in allowed["new"]))
        path = recording.folder / "new"
        try:
            await recording.save(checkpointer, "new", NEXT, overwrite=True)
            again = await self._number(recording, checkpointer, path)
        except PenstockError as error:
            raise _Problem("STUCK", f"the next save failed: {error!r}") from error

        left = {name for name in os.listdir(recording.folder) if name not in {*allowed, "old"}}
        if again != NEXT or left:
            raise _Problem("STUCK", f"after the next save, {again} is there, and {sorted(left)} is left")

    async def _look_at_steps(
        self, recording: Recording, allowed: dict[str, Numbers], replaced_by: dict[str, str]
    ) -> None:
        numbers: dict[str, int | None] = dict.fromkeys(allowed)
        if (recording.folder / "run").exists():
            numbers |= await self._numbers_of_steps(recording)
        for name in {*numbers, *allowed}:
            _check(f"step {name}", numbers.get(name), allowed.get(name, frozenset([None])))

        for gone, instead in replaced_by.items():
            if numbers[gone] is None and numbers[instead] is None:
                raise _Problem("LOST", f"step {gone} was deleted, and step {instead} is not there")

        changing = next((name for name, may_be in allowed.items() if len(may_be) > 1), "1")
        self._note(numbers[changing] == max(number or 0 for number in allowed[changing]))
        try:
            async with recording.manager() as manager:
                await recording.save_step(manager, NEXT)
        except PenstockError as error:
            raise _Problem("STUCK", f"the next save failed: {error!r}") from error

        expected = {name for name, number in numbers.items() if number is not None}
        left = set(os.listdir(recording.folder / "run")) - {*expected, "metadata", "old"}
        if left != {str(NEXT)}:
            raise _Problem("STUCK", f"after the next save, {sorted(left)} is left")

    async def _numbers_of_steps(self, recording: Recording) -> dict[str, int | None]:
        numbers: dict[str, int | None] = {}
        async with recording.manager(read_only=True) as manager:
            steps = manager.all_steps()
            latest = manager.latest_step()
            if latest != max(steps, default=None):
                raise _Problem("LOST", f"the latest step is {latest}, of {steps}")

            for step in steps:
                path = recording.folder / "run" / str(step)
                numbers[str(step)] = await self._number(recording, manager.checkpointer, path)

            trash = recording.folder / "run" / "old"
            for path in trash.iterdir() if trash.exists() else ():
                if await self._number(recording, manager.checkpointer, path) != int(path.name):
                    raise _Problem("MIXED", f"{path.name} in the trash is another step")

        return numbers

    async def _number(self, recording: Recording, checkpointer: Checkpointer, path: Path) -> int:
        try:
            number = await recording.number_at(checkpointer, path)
        except PenstockError as error:
            raise _Problem("LOST", f"{path.name} cannot be restored: {error!r}") from error

        if number is None:
            raise _Problem("MIXED", f"{path.name} is no state that was saved")

        return number

    def _note(self, is_new: bool) -> None:
        self._found.states["new" if is_new else "previous"] += 1


class _Problem(Exception):
    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def _check(name: str, number: int | None, may_be: Numbers) -> None:
    if number not in may_be:
        raise _Problem("LOST", f"{name} holds {number}, and should hold one of {set(may_be)}")


def _finished(content: Content) -> Content:
    """What is not temporary of a content."""
    return tuple(
        [
            (name, found if isinstance(found, FileLeft) else _finished(found))
            for name, found in content
            if "-tmp" not in name
        ]
    )


def look(folder: Path, kind: str, layout: str, **options: Any) -> Found:
    """Run a course on one layout in a folder, which is made."""
    folder.mkdir()

    async def run() -> Found:
        return await Course(folder, kind, layout, **options).run()

    return anyio.run(run)


def main() -> None:
    """Parse the command line, run the courses and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kinds", nargs="*", default=list(COURSES), choices=list(COURSES))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--limit", type=int, default=64, help="choices of lost names after each effect")
    parser.add_argument("--every", type=int, default=1, help="look at every so manieth content only")
    parser.add_argument("--traced", action="store_true", help="record system calls, with strace")
    parser.add_argument("--keep", action="store_true", help="keep the folders of what went wrong")
    options = parser.parse_args()
    place = Path(
        tempfile.mkdtemp(prefix="penstock-faults-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
    )
    heads = ("prefixes", "contents", "previous", "new", "MIXED", "LOST", "STUCK", "seconds")
    sys.stdout.write(f"{'course':20}{'layout':13}{''.join(f'{head:>10}' for head in heads)}\n")
    problems: list[str] = []
    total = [0] * len(heads)
    chosen = pairs(options.kinds, options.layouts)
    if options.traced:
        chosen += [(kind, "arrays") for kind in ORBAX_COURSES]
    for kind, layout in chosen:
        begun = time.monotonic()
        folder, traced = place / f"{kind}, {layout}", options.traced
        found = look(folder, kind, layout, limit=options.limit, every=options.every, traced=traced)
        row = [*found.row(), round(time.monotonic() - begun)]
        total = [*map(add, total, row)]
        sys.stdout.write(f"{kind:20}{layout:13}{''.join(f'{each:>10}' for each in row)}\n")
        sys.stdout.flush()
        problems += [f"{kind}, {layout}: {problem}" for problem in found.problems]

    sys.stdout.write(f"{'all':33}{''.join(f'{each:>10}' for each in total)}\n")
    for problem in problems[:20]:
        sys.stdout.write(f"{problem[:1000]}\n")
    if not options.keep:
        shutil.rmtree(place)
    if problems:
        sys.exit(f"{len(problems)} contents in which something is wrong")


if __name__ == "__main__":
    main()
