"""Entering and leaving a Checkpointer or a CheckpointManager."""

from __future__ import annotations

__all__ = ("AsyncOnly", "EnteredOnce", "own_tasks")

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import NoReturn, final

from anyio import create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup

from penstock.kernel.errors import ClosedError


@final
class EnteredOnce:
    """An async context that can be entered one time.

    Args:
        name: What callers call its owner, for messages.
    """

    __slots__ = ("_life", "_name", "_open")

    def __init__(self, name: str) -> None:
        self._name = name
        self._life: AbstractAsyncContextManager[None] | None = None
        self._open: EnteredOnce | None = None

    async def enter(self, live: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Enter the context that `live` makes.

        Raises:
            ClosedError: If it was entered before.
        """
        if self._life is not None:
            raise ClosedError(f"a {self._name} can be entered once; make another one")

        self._life = live()
        # A reference cycle keeps this alive longer than its owner: at interpreter exit no loop could close
        # it.
        self._open = self
        await self._life.__aenter__()

    async def leave(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        """Leave it, as `__aexit__` does."""
        assert self._life is not None
        self._open = None
        return await self._life.__aexit__(exc_type, exc_val, exc_tb)


def _raise(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure


@asynccontextmanager
async def own_tasks(
    on_leaving: Callable[[BaseException | None], None] = _raise,
) -> AsyncGenerator[TaskGroup]:
    """Run the body next to background tasks; a failure of the body cancels them.

    Args:
        on_leaving: Called when all tasks have ended, with the body's exception or None. It raises what the
            caller should see: by default the error itself, and not a group as a task group does.

    Cancellation:
        If the caller is cancelled, that is passed on at once and `on_leaving` is not called.
    """
    failure: BaseException | None = None
    async with create_task_group() as tasks:
        try:
            yield tasks
        except (get_cancelled_exc_class(), GeneratorExit):
            raise
        except BaseException as error:
            failure = error  # raised below, as it is and not in a group
            tasks.cancel_scope.cancel()

    try:
        on_leaving(failure)
    finally:
        del failure  # its traceback refers to this frame


class AsyncOnly:
    """Base of a public async context manager that has a blocking twin of its name in `penstock.sync`."""

    __slots__ = ()

    def __enter__(self) -> NoReturn:
        """Say how it is entered.

        Raises:
            TypeError: Always.
        """
        blocking = f"penstock.sync.{type(self).__name__}"
        raise TypeError(f"enter it by `async with`; without an event loop use `with {blocking}(...)`")

    def __exit__(self, *_: object) -> None:
        """Never called: nothing enters it."""
