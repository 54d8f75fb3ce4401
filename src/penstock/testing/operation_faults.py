"""A save and a restore that are stopped at every store operation, for the conformance classes."""

from __future__ import annotations

__all__ = ("Trial", "backends", "demand", "refuses")

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Final, final

import anyio
from anyio import create_task_group

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import PenstockError, StorageError
from penstock.kernel.protocols.stores import Store
from penstock.testing.faulty_store import FaultyStore

TIME_LIMIT_S = 60.0
EACH = 5  # every n-th stop is followed by another save


def backends() -> tuple[str, ...]:
    """The event loops to run on: trio, too, where it is installed."""
    return ("asyncio", "trio") if find_spec("trio") else ("asyncio",)


def demand(fulfilled: object, what: str) -> None:
    """Raise `AssertionError` with this text unless `fulfilled`: pytest does not rewrite asserts here."""
    if not fulfilled:
        raise AssertionError(what)


def refuses(call: Callable[[], object], kind: type[BaseException], what: str) -> BaseException:
    """Return the error that the call raises, which must be of this kind."""
    try:
        call()
    except kind as error:
        return error

    raise AssertionError(f"{what} must raise {kind.__name__}")


NAME: Final = "checkpoint"


@final
@dataclass(frozen=True)
class Trial:
    """A tree that is saved and restored: undisturbed, and with a stop at every store operation.

    Attributes:
        folder: Where; empty.
        tree: What is saved.
        expected: What must be restored.
        same: Returns whether the restored tree is the expected one.
        options: Makes the arguments of a Checkpointer, new ones for each.
        make_store: Makes the store.
        begins_empty: Whether each save begins with nothing there.
    """

    folder: str
    tree: Any
    expected: Any
    same: Callable[[Any, Any], bool]
    options: Callable[[], Mapping[str, Any]]
    make_store: Callable[[], Store] = field(default=LocalStore)
    begins_empty: bool = True

    @property
    def path(self) -> str:
        """The checkpoint."""
        return f"{self.folder}/{NAME}"

    def run(self, work: Callable[[], Any]) -> None:
        """Run a coroutine function on every event loop."""
        for backend in backends():
            _run(work, backend)

    def sweep_save(self) -> None:
        """Stop a save at every operation: by a failure on one event loop, by a cancel on the other."""
        _run(self.save_fails_everywhere, backends()[0])
        _run(self.save_is_cancelled_everywhere, backends()[-1])

    def sweep_restore(self) -> None:
        """Cancel a restore in every operation."""
        _run(self.restore_is_cancelled_everywhere, backends()[-1])

    async def there_and_back(self) -> None:
        """Save, restore and compare."""
        store = FaultyStore(self.make_store())
        await self._save(store)
        found = await self._restore(store)
        demand(self.same(found, self.expected), f"restored is {found!r}, and expected {self.expected!r}")
        demand(self._names() == [NAME], "a save must leave nothing beside the checkpoint")

    async def save_fails_everywhere(self) -> None:
        """Have each operation of a save fail in turn: the error is raised, and no file is left."""
        k = 1
        while True:
            store = FaultyStore(self.make_store())
            error = StorageError("any", "path", f"operation {k}", 5)
            store.fail_at(k, error)
            raised: PenstockError | None = None
            try:
                await self._save(store)
            except PenstockError as failure:
                raised = failure

            if k > len(store.operations):
                demand(raised is None, f"the save failed without a fault: {raised!r}")
                self.make_store().remove_tree(self.path)
                return
            where = f"operation {k}, {store.operations[k - 1].name}, failed"
            await self._after(store, raised is None, where, again=k % EACH == 0)
            k += 1

    async def save_is_cancelled_everywhere(self) -> None:
        """Cancel a save in each of its operations: it ends, and nothing is left."""
        k = 1
        while await self._cancelled_at(k, self._save):
            k += 1

        self.make_store().remove_tree(self.path)

    async def restore_is_cancelled_everywhere(self) -> None:
        """Cancel a restore in each of its operations: it ends, and holds nothing."""
        await self._save(FaultyStore(self.make_store()))
        filled = replace(self, begins_empty=False)
        k = 1
        while await filled._cancelled_at(k, filled._restore):
            k += 1

    async def _cancelled_at(self, k: int, work: Callable[[FaultyStore], Any]) -> bool:
        store = FaultyStore(self.make_store())
        hang = store.hang_at(k)

        async def do() -> None:
            try:
                await work(store)
            finally:
                hang.skip()  # there may be fewer operations

        async with create_task_group() as tasks:
            tasks.start_soon(do)
            await hang.wait_reached()
            tasks.cancel_scope.cancel()
            hang.release()

        if k > len(store.operations):
            return False

        where = f"cancelled in operation {k}, {store.operations[k - 1].name}"
        await self._after(store, None, where, again=k % EACH == 0)
        return True

    async def _after(self, store: FaultyStore, saved: bool | None, where: str, *, again: bool) -> None:
        """Check what is left: a whole checkpoint or nothing. If `again`, also that the next save works."""
        demand(store.open_files == 0, f"{where}, and a file is open")
        names = self._names()
        demand(set(names) <= {NAME}, f"{where}, but these files are left: {names}")
        there = NAME in names
        demand(saved is not True or there, f"{where}, the save succeeded, but there is no checkpoint")
        good = FaultyStore(self.make_store())
        if there:
            demand(
                self.same(await self._restore(good), self.expected),
                f"{where}, but it is another tree",
            )

        if again:
            await self._save(good)
        if self.begins_empty:
            good.remove_tree(self.path)

    async def _save(self, store: FaultyStore) -> None:
        plain = self.make_store()
        if plain.directories is None:
            plain.remove_tree(self.path)

        async with Checkpointer(store=store, **self.options()) as checkpointer:
            await (await checkpointer.save(self.path, self.tree, overwrite=True))
            self._nothing_held(checkpointer, store)

    def _names(self) -> list[str]:
        return list(self.make_store().list_directory(self.folder))

    async def _restore(self, store: FaultyStore) -> Any:
        async with Checkpointer(store=store, **self.options()) as checkpointer:
            found = await checkpointer.restore(self.path)
            self._nothing_held(checkpointer, store)

        return found

    def _nothing_held(self, checkpointer: Checkpointer, store: FaultyStore) -> None:
        statistics = checkpointer.statistics()
        demand(statistics.leased == 0, f"{statistics.leased} bytes of the budget were not given back")
        demand(store.open_files == 0, "a file was not closed")


def _run(work: Callable[[], Any], backend: str) -> None:
    """Run a coroutine function with a time limit."""

    async def limited() -> None:
        with anyio.fail_after(TIME_LIMIT_S):
            await work()

    anyio.run(limited, backend=backend)
