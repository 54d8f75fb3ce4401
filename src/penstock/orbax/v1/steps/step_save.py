"""The save of one step in the background, with the deletion of the steps that it replaces."""

from __future__ import annotations

__all__ = ("StepSave",)

from collections.abc import Callable, Generator, Sequence
from typing import Any, final

from penstock.kernel.concurrency.threads import Threads
from penstock.orbax.v1.common.operation import AsyncResponse, Operation, begin


@final
class StepSave(AsyncResponse[bool]):
    """What `save_async` returns. Its result is True, or the failure of the save.

    Args:
        step: The number of the step.
        saving: The save.
        doomed: The steps that are deleted once it is durable.
        delete: Deletes them; blocking.
        ended: Called by whoever waits, each time, once all is over, with whether it failed.
    """

    def __init__(
        self,
        step: int,
        saving: Operation[None],
        doomed: Sequence[int],
        delete: Callable[[Sequence[int]], None],
        ended: Callable[[StepSave, bool], None],
    ) -> None:
        self.step = step
        self._saving = saving
        self._doomed = doomed
        self._delete = delete
        self._ended = ended
        self._operation: Operation[bool] = begin(f"save of step {step}", self._run)

    def result(self, timeout: float | None = None) -> bool:
        """Wait until the step is durable and those that it replaces are gone.

        Args:
            timeout: The longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: If it is not done by then. It goes on.
            Exception: What the save failed with.
        """
        try:
            found = self._operation.result(timeout)
        except BaseException:
            if self.done():  # and the wait was not given up
                self._ended(self, True)
            raise

        self._ended(self, False)
        return found

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """See `AsyncResponse`."""
        self._operation.on_complete(callback)

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._operation.done()

    def cancel(self) -> None:
        """Ask the save to stop and undo its work. Does not wait."""
        self._saving.cancel()

    def __await__(self) -> Generator[Any, Any, bool]:
        return self._wait().__await__()

    async def _wait(self) -> bool:
        try:
            found = await self._operation
        except BaseException:
            if self.done():
                self._ended(self, True)
            raise

        self._ended(self, False)
        return found

    async def _run(self, operation: Operation[bool]) -> bool:
        await self._saving
        await Threads(1).run(self._delete, self._doomed)
        return True
