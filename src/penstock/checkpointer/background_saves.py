"""The background saves of one Checkpointer, and the failures that no caller has seen yet."""

from __future__ import annotations

__all__ = ("BackgroundSaves",)

from typing import final
from weakref import WeakValueDictionary

from anyio import Lock

from penstock.checkpointer.save_task import SaveTask


@final
class BackgroundSaves:
    """Holds every save that is under way or failed unseen. Used in one event loop."""

    __slots__ = ("_saves", "_turns")

    def __init__(self) -> None:
        self._saves: list[SaveTask] = []
        # A lock lives as long as a save holds or awaits it, so paths do not pile up.
        self._turns: WeakValueDictionary[str, Lock] = WeakValueDictionary()

    def turn(self, path: str) -> Lock:
        """Return the lock that serialises saves to `path`."""
        return self._turns.setdefault(path, Lock())

    def add(self, save: SaveTask) -> None:
        """Add a save, and drop ended saves whose failure, if any, was seen."""
        self._saves = [other for other in self._saves if not other.future.done or other.promise.error_unseen]
        self._saves.append(save)

    @property
    def under_way(self) -> bool:
        """Whether a save has not ended."""
        return any(not save.future.done for save in self._saves)

    async def wait_ended(self) -> None:
        """Wait until all saves that were added so far have ended."""
        for save in tuple(self._saves):
            await save.wait_ended()

    def raise_unseen(self) -> None:
        """Raise the first unseen failure, if there is one."""
        for save in self._saves:
            error = save.promise.error_unseen
            if error is not None:
                save.promise.mark_seen()
                raise error

    def raise_on_leaving(self, failure: BaseException | None) -> None:
        """Raise `failure` or, without one, the first unseen failure, if any.

        Further unseen failures are added to it as notes.
        """
        unseen = self.take_unseen()
        failure = failure or next(iter(unseen.values()), None)
        if failure is None:
            return

        for path, other in unseen.items():
            if other is not failure:
                failure.add_note(f"the background save of {path!r} failed too: {other!r}")

        try:
            raise failure
        finally:
            del failure, unseen  # the traceback refers to this frame

    def take_unseen(self) -> dict[str, BaseException]:
        """Return every unseen failure, by path. The caller must raise or report them."""
        unseen: dict[str, BaseException] = {}
        for save in self._saves:
            error = save.promise.error_unseen
            if error is not None:
                save.promise.mark_seen()
                unseen.setdefault(save.future.path, error)

        return unseen
