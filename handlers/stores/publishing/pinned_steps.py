"""The steps that a manager has pinned, for `penstock ls` to show for as long as the manager is open."""

from __future__ import annotations

__all__ = ("PinnedSteps", "read_pins")

import errno
import json
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final, cast, final

import anyio

from penstock.handlers.stores.publishing.writer_hold import WRITER
from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import Store, is_at_work

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads

_PINS: Final = "pins.json"
# Another process wrote the file: it is not read into memory whatever its size.
_MOST_BYTES: Final = 2**20


@final
class PinnedSteps:
    """Steps that stay, whatever a policy says. Changed in the event loop.

    They are listed in a file of the directory that the writer of a root holds: it goes when the manager does,
    and after a crash it is not held. On a store without such directories they are not shown. A medium that
    does not answer delays no caller.

    Args:
        store: Where the root is.
        root: Of the steps.
        events: For what could not be written.
        is_told: Whether this process holds the root now, and tells of it.
    """

    __slots__ = ("_changed", "_events", "_file", "_is_told", "_steps", "_store")

    def __init__(self, store: Store, root: str, events: Any, *, is_told: Callable[[], bool]) -> None:
        self._store = store
        self._file = os.path.join(root, WRITER, _PINS)
        self._events = events
        self._is_told = is_told
        self._steps: set[int] = set()
        self._changed = anyio.Event()

    def __contains__(self, step: object) -> bool:
        return step in self._steps

    def add(self, step: int) -> None:
        """Pin a step."""
        self._steps.add(step)
        self._changed.set()

    def discard(self, step: int) -> None:
        """Pin it no more."""
        self._steps.discard(step)
        self._changed.set()

    def tell_again(self) -> None:
        """Have them written, since the root was taken only now."""
        self._changed.set()

    async def tell(self, threads: Threads) -> None:
        """Write the steps whenever they change, until it is cancelled."""
        while self._store.directories is not None:
            self._changed = anyio.Event()
            try:
                await threads.run(self._write, sorted(self._steps))
            except StorageError as error:
                self._events.warning("step.pins_untold", path=self._file, error=repr(error))

            await self._changed.wait()

    def _write(self, steps: list[int]) -> None:
        store = self._store
        if not self._is_told():  # or the pins of the manager that holds it would be written over
            return
        if not steps and store.kind(self._file) is None:  # a crashed manager may have left its own
            return
        if store.kind(os.path.dirname(self._file)) == "directory":
            store.replace_file(self._file, json.dumps(steps).encode())  # half of a list pins nothing


def read_pins(store: Store, root: str) -> Collection[int]:
    """Return the steps that an open manager has pinned; none if no manager is open. Blocking.

    Raises:
        StorageError: If the medium refuses.
    """
    place = os.path.join(root, WRITER)
    file = os.path.join(place, _PINS)
    try:
        if store.kind(file) != "file" or store.size(file) > _MOST_BYTES:
            return ()

        found: object = json.loads(store.read_file(file))
    except (ValueError, RecursionError):
        return ()
    except StorageError as error:
        if error.errno == errno.ENOENT:  # it has just gone
            return ()

        raise

    steps = cast("list[object]", found) if isinstance(found, list) else []
    numbers = [step for step in steps if isinstance(step, int)]
    return numbers if numbers and is_at_work(store, place) else ()
