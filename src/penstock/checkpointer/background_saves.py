"""The saves of one Checkpointer that go on behind its callers, and the failures nobody was told of."""

from __future__ import annotations

__all__ = ("BackgroundSaves",)

from typing import final
from weakref import WeakValueDictionary

from anyio import Lock

from penstock.checkpointer.save_task import SaveTask


@final
class BackgroundSaves:
    """Knows every save that is under way, or that failed unseen. Used from one event loop."""

    __slots__ = ("_saves", "_turns")

    def __init__(self) -> None:
        self._saves: list[SaveTask] = []
        # A lock lives as long as a save holds or awaits it, so paths do not pile up.
        self._turns: WeakValueDictionary[str, Lock] = WeakValueDictionary()

    def turn(self, path: str) -> Lock:
        """Return what saves to `path` hold, so that they follow each other."""
        return self._turns.setdefault(path, Lock())

    def add(self, save: SaveTask) -> None:
        """Remember a save, and forget those that have nothing more to say."""
        self._saves = [other for other in self._saves if not other.future.done or other.promise.error_unseen]
        self._saves.append(save)

    @property
    def under_way(self) -> bool:
        """Whether some save is not over."""
        return any(not save.future.done for save in self._saves)

    async def wait_ended(self) -> None:
        """Wait until none of the saves there are now runs any more."""
        for save in tuple(self._saves):
            await save.wait_ended()

    def raise_unseen(self) -> None:
        """Raise the first failure that nobody was told of, if there is one."""
        for save in self._saves:
            error = save.promise.error_unseen
            if error is not None:
                save.promise.mark_seen()
                raise error

    def raise_on_leaving(self, failure: BaseException | None) -> None:
        """Raise what the Checkpointer is left with: `failure`, or else the first that nobody was told of.

        The other failures that nobody was told of are notes of it.
        """
        unseen = self.take_unseen()
        failure = failure or next(iter(unseen.values()), None)
        if failure is None:
            return

        for path, other in unseen.items():
            if other is not failure:
                failure.add_note(f"in the background, the save of {path!r} failed too: {other!r}")

        try:
            raise failure
        finally:
            del failure, unseen  # the traceback refers to this frame

    def take_unseen(self) -> dict[str, BaseException]:
        """Return every failure that nobody was told of, by path; whoever takes them tells."""
        unseen: dict[str, BaseException] = {}
        for save in self._saves:
            error = save.promise.error_unseen
            if error is not None:
                save.promise.mark_seen()
                unseen.setdefault(save.future.path, error)

        return unseen
