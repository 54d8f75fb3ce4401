"""The manager and the watching for plain scripts. Public as `penstock.sync`."""

from __future__ import annotations

__all__ = ("CheckpointManager", "watch")

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, Unpack, final, overload
from weakref import finalize

from penstock.blocking.portal import Portal, refuse_running_loop
from penstock.blocking.twins import blocking_method, parameters_of, shown_as
from penstock.checkpointer.checkpointer import Path
from penstock.checkpointer.parts import RestoreKeywords
from penstock.kernel.pipeline.failures import short_tracebacks
from penstock.steps import manager
from penstock.steps.step_names import NameFormat
from penstock.steps.step_watch import watch as watch_async

if TYPE_CHECKING:
    import jax

T = TypeVar("T")


@short_tracebacks
@final
class CheckpointManager:
    """`penstock.CheckpointManager` for code without an event loop. A context manager, used by any thread.

    SIGTERM is heard if the context is entered in the main thread.

    Raises:
        RunningLoopError: From every method, if called inside a running event loop.
    """

    @parameters_of(manager.CheckpointManager)
    def __init__(self, root: Path, **options: Any) -> None:
        refuse_running_loop()
        sigterm = options.pop("sigterm", None)
        self._inner = manager.CheckpointManager(root, sigterm=False, **options)
        self._sigterm = self._inner.awaits_preemption if sigterm is None else bool(sigterm)
        self._portal = Portal(self._inner, "CheckpointManager", self._inner.checkpointer.stopping)
        self._stack = ExitStack()
        finalize(self, self._portal.close)  # in a notebook, where nothing else ends it

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

    save = blocking_method(manager.CheckpointManager.save)

    @overload
    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        as_type: type[T],
        like: object = ...,
        **options: Unpack[RestoreKeywords],
    ) -> T: ...
    @overload
    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        like: EllipsisType = ...,
        **options: Unpack[RestoreKeywords],
    ) -> Any: ...
    @overload
    def restore(
        self, step: SupportsIndex | None = None, *, like: type[T], **options: Unpack[RestoreKeywords]
    ) -> T: ...
    @overload
    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        like: jax.ShapeDtypeStruct,
        **options: Unpack[RestoreKeywords],
    ) -> jax.Array: ...
    @overload
    def restore(
        self, step: SupportsIndex | None = None, *, like: T, **options: Unpack[RestoreKeywords]
    ) -> T: ...
    @partial(shown_as, manager.CheckpointManager.restore)
    def restore(self, step: SupportsIndex | None = None, **options: Any) -> Any:
        """Return what was saved as a step; takes what `penstock.CheckpointManager.restore` takes."""
        return self._portal.call(self._inner.restore, step, **options)

    def all_steps(self) -> Sequence[int]:
        return self._portal.call_plain(self._inner.all_steps)

    def latest_step(self) -> int | None:
        return self._portal.call_plain(self._inner.latest_step)

    best_step = blocking_method(manager.CheckpointManager.best_step)
    metadata = blocking_method(manager.CheckpointManager.metadata)
    root_metadata = blocking_method(manager.CheckpointManager.root_metadata)
    delete = blocking_method(manager.CheckpointManager.delete)
    reload = blocking_method(manager.CheckpointManager.reload)
    wait = blocking_method(manager.CheckpointManager.wait)

    def close(self) -> None:
        """Wait for its saves; afterwards it takes no more calls. Opened without a `with`, it is left, too."""
        self._portal.call(self._inner.close)
        self._portal.close()

    def pin(self, step: SupportsIndex) -> None:
        self._portal.call_plain(self._inner.pin, step)

    def unpin(self, step: SupportsIndex) -> None:
        self._portal.call_plain(self._inner.unpin, step)

    def watch(
        self,
        *,
        after: int | None = None,
        latest_only: bool = False,
        timeout_s: float | None = None,
        until: Callable[[], bool] | None = None,
        interval_s: float = 1.0,
    ) -> Iterator[int]:
        """Yield each step that becomes durable; arguments as for `penstock.watch`."""
        open_watch = partial(
            self._inner.watch,
            after=after,
            latest_only=latest_only,
            timeout_s=timeout_s,
            until=until,
            interval_s=interval_s,
        )
        return self._portal.iterate(open_watch)


def watch(
    root: Path,
    *,
    names: NameFormat | None = None,
    after: int | None = None,
    latest_only: bool = False,
    timeout_s: float | None = None,
    until: Callable[[], bool] | None = None,
    interval_s: float = 1.0,
) -> Iterator[int]:
    """Yield each step in `root` that becomes durable; as `penstock.watch`."""
    refuse_running_loop()
    open_watch = partial(
        watch_async,
        root,
        names=names,
        after=after,
        latest_only=latest_only,
        timeout_s=timeout_s,
        until=until,
        interval_s=interval_s,
    )
    with Portal(nullcontext(), "watch") as portal:
        yield from portal.iterate(open_watch)
