"""The manager and the watching for plain scripts. Public as `penstock.sync`."""

from __future__ import annotations

__all__ = ("CheckpointManager", "watch")

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any, SupportsIndex, final

from penstock.blocking.portal import Portal, refuse_running_loop
from penstock.kernel.pipeline.futures import SaveFuture
from penstock.steps import manager
from penstock.steps.keep_policies import Metric, Mode
from penstock.steps.step_contents import StepMetadata
from penstock.steps.step_watch import watch as watch_async


@final
class CheckpointManager:
    """`penstock.CheckpointManager` for code without an event loop. A context manager, used by any thread.

    SIGTERM is heard if the context is entered in the main thread.

    Args:
        root: The directory of steps.
        **options: Those of `penstock.CheckpointManager`.

    Raises:
        RunningLoopError: From every method, if called inside a running event loop.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        refuse_running_loop()
        sigterm = options.pop("sigterm", None)
        self._inner = manager.CheckpointManager(root, sigterm=False, **options)
        self._sigterm = self._inner.awaits_preemption if sigterm is None else bool(sigterm)
        self._portal = Portal(self._inner, "CheckpointManager", self._inner.checkpointer.stopping)
        self._stack = ExitStack()

    def __enter__(self) -> CheckpointManager:
        with ExitStack() as stack:
            stack.enter_context(self._portal)
            if self._sigterm and threading.current_thread() is threading.main_thread():
                before = signal.signal(signal.SIGTERM, self._hear)
                stack.callback(signal.signal, signal.SIGTERM, before)

            self._stack = stack.pop_all()

        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return self._stack.__exit__(exc_type, exc_val, exc_tb)

    def _hear(self, _: int, __: object) -> None:
        self._inner.preempt()

    @property
    def root(self) -> str:
        return self._inner.root

    @property
    def preempted(self) -> bool:
        return self._inner.preempted

    def preempt(self) -> None:
        self._inner.preempt()

    def should_save(self, step: SupportsIndex) -> bool:
        return self._portal.call_plain(self._inner.should_save, step)

    def save(self, step: SupportsIndex, items: object, **options: Any) -> SaveFuture | None:
        """Begin to save a step, if the policy wants it; return once it is staged."""
        return self._portal.call(self._inner.save, step, items, **options)

    def restore(self, step: SupportsIndex | None = None, **options: Any) -> Any:
        """Return what was saved as a step, by default the latest."""
        return self._portal.call(self._inner.restore, step, **options)

    def all_steps(self) -> Sequence[int]:
        return self._portal.call_plain(self._inner.all_steps)

    def latest_step(self) -> int | None:
        return self._portal.call_plain(self._inner.latest_step)

    def best_step(self, metric: Metric | None = None, mode: Mode = "min") -> int | None:
        return self._portal.call(self._inner.best_step, metric, mode)

    def metadata(self, step: SupportsIndex | None = None) -> StepMetadata:
        return self._portal.call(self._inner.metadata, step)

    def root_metadata(self) -> Mapping[str, Any] | None:
        return self._portal.call(self._inner.root_metadata)

    def delete(self, step: SupportsIndex) -> None:
        """Delete a step; returns when it is gone."""
        self._portal.call(self._inner.delete, step)

    def pin(self, step: SupportsIndex) -> None:
        self._portal.call_plain(self._inner.pin, step)

    def unpin(self, step: SupportsIndex) -> None:
        self._portal.call_plain(self._inner.unpin, step)

    def reload(self) -> None:
        self._portal.call(self._inner.reload)

    def watch(self, **options: Any) -> Iterator[int]:
        """Yield each step that becomes durable."""
        return self._portal.iterate(lambda: self._inner.watch(**options))

    def wait(self) -> None:
        """Wait until no save is under way; raise a failure that nobody was told of."""
        self._portal.call(self._inner.wait)

    def close(self) -> None:
        """Wait as `wait` does; afterwards nothing more can be asked."""
        self._portal.call(self._inner.close)


def watch(root: str | os.PathLike[str], **options: Any) -> Iterator[int]:
    """Yield each step in `root` that becomes durable; as `penstock.watch`."""
    refuse_running_loop()
    with Portal(nullcontext(), "watch") as portal:
        yield from portal.iterate(lambda: watch_async(root, **options))
