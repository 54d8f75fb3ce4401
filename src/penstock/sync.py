"""The same for plain scripts, which have no event loop: one runs in a thread meanwhile.

```python
with penstock.sync.Checkpointer() as checkpointer:
    save = checkpointer.save(path, state)   # staged: the state may change now
    report = save.result()                  # durable and visible
```
"""

from __future__ import annotations

__all__ = (
    "Checkpointer",
    "convert",
    "export_safetensors",
    "metadata",
    "restore",
    "restore_items",
    "save",
    "verify",
)

import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, final

from anyio import NoEventLoopError
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.lowlevel import current_token

from penstock import api
from penstock.description import CheckpointMetadata
from penstock.kernel.errors import ClosedError, RunningLoopError
from penstock.kernel.futures import SaveFuture
from penstock.kernel.messages import SaveReport
from penstock.verifying import VerifyReport

T = TypeVar("T")


@final
class Checkpointer:
    """`penstock.Checkpointer` for code without an event loop. A context manager, used by any thread.

    Args:
        **options: Those of `penstock.Checkpointer`.

    Raises:
        RunningLoopError: From every method, if called inside a running event loop.
    """

    def __init__(self, **options: Any) -> None:
        _refuse_running_loop()
        self._inner = api.Checkpointer(**options)
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Checkpointer:
        _refuse_running_loop()
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self._inner))
            stack.enter_context(self._inner.stopping.holding_sigterm())
            self._stack = stack.pop_all()

        # What the interpreter finds unclosed at its end it would close, by a loop that is dead by then.
        self._inner.stopping.keeps = self._stack
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        portal, self._portal = self._portal, None
        if not self._inner.stopping.is_home:
            self._forget(portal)
            return None

        self._inner.stopping.keeps = None
        return self._stack.__exit__(exc_type, exc_val, exc_tb)

    def _forget(self, portal: BlockingPortal | None) -> None:
        """In a fork: have nobody wait for the loop and the thread, which are not here, not even when collected."""
        if portal is not None:
            with suppress(StopIteration, RuntimeError):
                portal.stop().send(None)  # only notes that it has stopped

        self._stack.pop_all()

    def save(self, path: str | os.PathLike[str], tree: object, **options: Any) -> SaveFuture:
        """Begin to save; return once `tree` is staged. Call `.result()` for the durable checkpoint."""
        return self._open().call(partial(self._inner.save, path, tree, **options))

    def restore(self, path: str | os.PathLike[str], **options: Any) -> Any:
        """Return the tree saved at `path`."""
        return self._open().call(partial(self._inner.restore, path, **options))

    def restore_items(self, path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
        """Return the values of the items saved at `path`, by name."""
        return self._open().call(partial(self._inner.restore_items, path, **options))

    def metadata(self, path: str | os.PathLike[str], *, item: str | None = None) -> CheckpointMetadata:
        """Say what the checkpoint at `path` holds."""
        return self._open().call(partial(self._inner.metadata, path, item=item))

    def verify(self, path: str | os.PathLike[str], *, item: str | None = None) -> VerifyReport:
        """Compare the checkpoint at `path` with its checksums."""
        return self._open().call(partial(self._inner.verify, path, item=item))

    def wait(self) -> None:
        """Wait until no save is under way; raise a failure that nobody was told of."""
        self._open().call(self._inner.wait)

    def _open(self) -> BlockingPortal:
        _refuse_running_loop()
        self._inner.stopping.check_process()
        if self._portal is None:
            raise ClosedError("the Checkpointer is not open; use it inside its `with`")

        return self._portal


def save(path: str | os.PathLike[str], tree: object, **options: Any) -> SaveReport:
    """Save `tree` at `path` and return when it is durable and visible; as `penstock.save`."""
    return _once(partial(api.save, path, tree, **options))


def restore(path: str | os.PathLike[str], **options: Any) -> Any:
    """Return the tree saved at `path`; as `penstock.restore`."""
    return _once(partial(api.restore, path, **options))


def restore_items(path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Return the values of the items saved at `path`, by name; as `penstock.restore_items`."""
    return _once(partial(api.restore_items, path, **options))


def metadata(path: str | os.PathLike[str], *, item: str | None = None) -> CheckpointMetadata:
    """Say what the checkpoint at `path` holds; as `penstock.metadata`."""
    return _once(partial(api.metadata, path, item=item))


def verify(path: str | os.PathLike[str], *, item: str | None = None) -> VerifyReport:
    """Compare the checkpoint at `path` with its checksums; as `penstock.verify`."""
    return _once(partial(api.verify, path, item=item))


def convert(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], **options: Any
) -> SaveReport:
    """Write what is saved at `source` to `destination`, in another format; as `penstock.convert`."""
    return _once(partial(api.convert, source, destination, **options))


def export_safetensors(tree: object, destination: str | os.PathLike[str], **options: Any) -> SaveReport:
    """Write a tree as safetensors; as `penstock.export_safetensors`."""
    return _once(partial(api.export_safetensors, tree, destination, **options))


def _once(function: Callable[[], Awaitable[T]]) -> T:
    """Run one call in an event loop of its own."""
    _refuse_running_loop()
    with start_blocking_portal() as portal:
        return portal.call(function)


def _refuse_running_loop() -> None:
    try:
        current_token()
    except NoEventLoopError:
        return

    raise RunningLoopError(
        "penstock.sync would block the event loop that is running here; await penstock.save, "
        "penstock.restore or a penstock.Checkpointer instead"
    )
