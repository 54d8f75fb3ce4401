"""The durable steps of a root known to this process, and what was read about them."""

from __future__ import annotations

__all__ = ("Catalogue",)

import os
from collections.abc import Mapping, Sequence
from typing import final

from structlog.stdlib import BoundLogger

from penstock.kernel.errors import CorruptCheckpointError, NotACheckpointError
from penstock.kernel.protocols.stores import Store
from penstock.steps import step_directory as on_disk
from penstock.steps.keep_policies import Needs, StepInfo
from penstock.steps.step_names import NameFormat


@final
class Catalogue:
    """Steps by number. Changed in the event loop; `infos` reads files, and is called in a thread.

    Args:
        store: Where `root` lies.
        root: The directory of steps.
        names: Names of step directories.
        events: Told of steps whose metrics or time cannot be read.
    """

    __slots__ = ("_events", "_infos", "_names", "_reader", "_root", "_steps", "_store", "_whole")

    def __init__(self, store: Store, root: str, names: NameFormat, events: BoundLogger) -> None:
        self._reader = on_disk.StepReader(store)
        self._store = store
        self._root = root
        self._names = names
        self._events = events
        self._steps: dict[int, str] = {}
        self._infos: dict[tuple[int, Needs], StepInfo] = {}
        self._whole: set[int] = set()  # saved here, or looked at before

    @property
    def steps(self) -> Sequence[int]:
        """All of them, ascending."""
        return tuple(self._steps)

    @property
    def latest(self) -> int | None:
        """The last one; None if there is none."""
        return next(reversed(self._steps), None)

    def require_latest(self) -> int:
        """Return the last one.

        Raises:
            NotACheckpointError: If there is none.
        """
        latest = self.latest
        if latest is None:
            raise NotACheckpointError(self._root, "there is no step in it")

        return latest

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def name(self, step: int) -> str:
        """The name of a step's directory, whether it exists or not."""
        return self._steps.get(step) or self._names.name(step)

    def path(self, step: int) -> str:
        """The directory of a step, whether it exists or not."""
        return os.path.join(self._root, self.name(step))

    def replace(self, steps: Mapping[int, str]) -> None:
        """Replace the steps by those found on the medium (number to name, ascending). Forget all others."""
        self._steps = dict(steps)
        self._infos = {}
        self._whole.clear()

    def add(self, step: int, name: str) -> None:
        """Note a step that is durable now, or was overwritten."""
        is_last = step > (-1 if self.latest is None else self.latest)
        self._steps[step] = name
        if not is_last:
            self._steps = {number: self._steps[number] for number in sorted(self._steps)}

        self._forget(step)
        self._whole.add(step)

    def remove(self, steps: Sequence[int]) -> dict[int, str]:
        """Remove steps; return those that were known, with their names."""
        gone = {step: self._steps.pop(step) for step in steps if step in self._steps}
        for step in gone:
            self._forget(step)

        return gone

    def infos(self, steps: Mapping[int, str], needs: Needs) -> list[StepInfo]:
        """Return what policies look at, reading what was not read before. Blocking.

        Args:
            steps: Number to name, from `snapshot`.
            needs: What has to be read.
        """
        if not needs:
            return [StepInfo(step) for step in steps]

        return [self._info(step, name, needs) for step, name in steps.items()]

    def not_whole(self, steps: Mapping[int, str]) -> set[int]:
        """Return the steps in which there is no finished checkpoint that penstock knows. Blocking.

        They have a step's name and perhaps nothing that could be restored: an empty directory, what another
        program put there, what was deleted by hand meanwhile. Each is looked at once.

        Args:
            steps: Number to name, from `snapshot`.
        """
        found: set[int] = set()
        for step, name in steps.items():
            path = os.path.join(self._root, name)
            if step not in self._whole and not on_disk.holds_checkpoint(self._store, path):
                self._events.warning("step.not_restorable", path=path)
                found.add(step)

        self._whole |= steps.keys() - found
        return found

    def snapshot(self) -> dict[int, str]:
        """Return number and name of each step; a copy."""
        return dict(self._steps)

    def _info(self, step: int, name: str, needs: Needs) -> StepInfo:
        known = self._infos.get((step, needs))
        if known is not None:
            return known

        path = os.path.join(self._root, name)
        try:
            info = self._reader.info(path, step, needs)
        except CorruptCheckpointError as error:
            self._events.warning("step.unreadable", path=path, error=repr(error))
            info = StepInfo(step, is_readable=False)

        self._infos[step, needs] = info
        return info

    def _forget(self, step: int) -> None:
        self._whole.discard(step)
        for key in [key for key in self._infos if key[0] == step]:
            del self._infos[key]
