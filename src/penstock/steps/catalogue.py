"""The durable steps of a root known to this process, and what was read about them."""

from __future__ import annotations

__all__ = ("Catalogue", "NamedSteps", "StepFiles")

import os
from collections.abc import Mapping, Sequence
from typing import Protocol, final

from structlog.stdlib import BoundLogger

from penstock.kernel.errors import CorruptCheckpointError, NotACheckpointError
from penstock.kernel.protocols.stores import Store
from penstock.steps import step_directory as on_disk
from penstock.steps.keep_policies import EVERYTHING, Needs, StepInfo
from penstock.steps.step_names import NameFormat


class StepFiles(Protocol):
    """Finds the steps of a root, and reads what policies look at. Blocking."""

    def name(self, step: int, /) -> str:
        """Return the name of the directory of a new step."""
        ...

    def find(self, listed: Sequence[str] | None = None, /) -> Mapping[int, str]:
        """Return number and name of each step, ascending.

        Args:
            listed: What `list_root` returned just now.
        """
        ...

    def leftovers(self, listed: Sequence[str], /) -> Sequence[str]:
        """Name what interrupted saves and deletions left, of all that was listed."""
        ...

    def info(self, step: int, name: str, needs: Needs, /) -> StepInfo:
        """Read the facts of a step that a policy needs.

        Raises:
            CorruptCheckpointError: If a document is damaged.
        """
        ...


@final
class NamedSteps(StepFiles):
    """Steps whose directories are named in one format.

    Args:
        store: Where `root` is.
        root: The directory of steps.
        names: Names of step directories.
    """

    __slots__ = ("_names", "_reader", "_root", "_store")

    def __init__(self, store: Store, root: str, names: NameFormat) -> None:
        self._store = store
        self._root = root
        self._names = names
        self._reader = on_disk.StepReader(store)

    def name(self, step: int, /) -> str:
        """See `StepFiles`."""
        return self._names.name(step)

    def find(self, listed: Sequence[str] | None = None, /) -> Mapping[int, str]:
        """See `StepFiles`."""
        return on_disk.find_steps(self._store, self._root, self._names, listed)

    def leftovers(self, listed: Sequence[str], /) -> Sequence[str]:
        """See `StepFiles`. Those of steps of this format alone."""
        return on_disk.leftovers(listed, self._names)

    def info(self, step: int, name: str, needs: Needs, /) -> StepInfo:
        """See `StepFiles`."""
        return self._reader.info(os.path.join(self._root, name), step, needs)


@final
class Catalogue:
    """Steps by number. Changed by one caller at a time; `infos` reads files, and may run in a thread.

    Args:
        store: Where `root` is.
        root: The directory of steps.
        files: Names the steps, and reads what is known of them.
        events: The log of steps whose metrics or time cannot be read.
        by_number: Whether steps are ordered by number; else in the order in which they came, as in Orbax.
    """

    __slots__ = ("_by_number", "_events", "_files", "_infos", "_root", "_steps", "_store", "_whole")

    def __init__(
        self, store: Store, root: str, files: StepFiles, events: BoundLogger, *, by_number: bool = True
    ) -> None:
        self._files = files
        self._by_number = by_number
        self._store = store
        self._root = root
        self._events = events
        self._steps: dict[int, str] = {}
        self._infos: dict[tuple[int, Needs], StepInfo] = {}
        self._whole: set[int] = set()  # saved here, or looked at before

    @property
    def steps(self) -> Sequence[int]:
        """All of them."""
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
        return self._steps.get(step) or self._files.name(step)

    def path(self, step: int) -> str:
        """The directory of a step, whether it exists or not."""
        return os.path.join(self._root, self.name(step))

    def replace(self, steps: Mapping[int, str]) -> None:
        """Replace the steps by those found on the medium (number to name, ascending). Forget all others."""
        self._steps = dict(steps)
        self._infos = {}
        self._whole.clear()

    def add(self, step: int, name: str, info: StepInfo | None = None) -> None:
        """Note a step that is durable now, or was overwritten.

        Args:
            step: Its number.
            name: Of its directory.
            info: All that policies may look at, if that is known already: then it is not read.
        """
        is_last = step > (-1 if self.latest is None else self.latest)
        if not self._by_number:
            self._steps.pop(step, None)

        self._steps[step] = name
        if not is_last and self._by_number:
            self.sort()

        self._forget(step)
        self._whole.add(step)
        if info is not None:
            every: tuple[Needs, ...] = (frozenset({"time"}), frozenset({"metrics"}), EVERYTHING)
            self._infos.update({(step, needs): info for needs in every})

    def sort(self) -> None:
        """Order the steps by number."""
        self._steps = {number: self._steps[number] for number in sorted(self._steps)}

    def remove(self, steps: Sequence[int]) -> dict[int, str]:
        """Remove steps; return those that were known, with their names."""
        gone = {step: self._steps.pop(step) for step in steps if step in self._steps}
        for step in gone:
            self._forget(step)

        return gone

    def infos(self, steps: Mapping[int, str], needs: Needs) -> list[StepInfo]:
        """Return the infos of steps for policies, reading those not read before. Blocking.

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
            if step not in self._whole and on_disk.step_at(self._store, path).state != "finished":
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

        try:
            info = self._files.info(step, name, needs)
        except CorruptCheckpointError as error:
            path = os.path.join(self._root, name)
            self._events.warning("step.unreadable", path=path, error=repr(error))
            info = StepInfo(step, is_readable=False)

        self._infos[step, needs] = info
        return info

    def _forget(self, step: int) -> None:
        self._whole.discard(step)
        for key in [key for key in self._infos if key[0] == step]:
            del self._infos[key]
