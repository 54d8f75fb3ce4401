"""The same for plain scripts, which have no event loop: one runs in a thread meanwhile.

```python
with penstock.sync.Checkpointer() as checkpointer:
    save = checkpointer.save(path, state)   # staged: the state may change now
    report = save.result()                  # durable and visible
```
"""

from __future__ import annotations

__all__ = (
    "CheckpointManager",
    "Checkpointer",
    "convert",
    "export_safetensors",
    "metadata",
    "restore",
    "restore_items",
    "save",
    "verify",
    "watch",
)

import os
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, final

from penstock import api
from penstock.blocking.portal import Portal, refuse_running_loop, run_once
from penstock.blocking.sync_steps import CheckpointManager, watch
from penstock.checkpointer.description import CheckpointMetadata
from penstock.checkpointer.verify import VerifyReport
from penstock.kernel.messages.save import SaveReport
from penstock.kernel.pipeline.futures import SaveFuture
from penstock.kernel.protocols.leaf import KeyPath


@final
class Checkpointer:
    """`penstock.Checkpointer` for code without an event loop. A context manager, used by any thread.

    Args:
        **options: Those of `penstock.Checkpointer`.

    Raises:
        RunningLoopError: From every method, if called inside a running event loop.
    """

    def __init__(self, **options: Any) -> None:
        refuse_running_loop()
        self._inner = api.Checkpointer(**options)
        self._portal = Portal(self._inner, "Checkpointer", self._inner.stopping)

    def __enter__(self) -> Checkpointer:
        self._portal.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return self._portal.__exit__(exc_type, exc_val, exc_tb)

    def save(self, path: str | os.PathLike[str], tree: object, **options: Any) -> SaveFuture:
        """Begin to save; return once `tree` is staged. Call `.result()` for the durable checkpoint."""
        return self._portal.call(self._inner.save, path, tree, **options)

    def restore(self, path: str | os.PathLike[str], **options: Any) -> Any:
        """Return the tree saved at `path`."""
        return self._portal.call(self._inner.restore, path, **options)

    def stream(self, path: str | os.PathLike[str], **options: Any) -> Iterator[tuple[KeyPath, Any]]:
        """Yield the leaves saved at `path`, as pairs of key path and value."""
        return self._portal.iterate(lambda: self._inner.stream(path, **options))

    def restore_items(self, path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
        """Return the values of the items saved at `path`, by name."""
        return self._portal.call(self._inner.restore_items, path, **options)

    def metadata(self, path: str | os.PathLike[str], *, item: str | None = None) -> CheckpointMetadata:
        """Say what the checkpoint at `path` holds."""
        return self._portal.call(self._inner.metadata, path, item=item)

    def verify(self, path: str | os.PathLike[str], *, item: str | None = None) -> VerifyReport:
        """Compare the checkpoint at `path` with its checksums."""
        return self._portal.call(self._inner.verify, path, item=item)

    def wait(self) -> None:
        """Wait until no save is under way; raise a failure that nobody was told of."""
        self._portal.call(self._inner.wait)


def save(path: str | os.PathLike[str], tree: object, **options: Any) -> SaveReport:
    """Save `tree` at `path` and return when it is durable and visible; as `penstock.save`."""
    return run_once(partial(api.save, path, tree, **options))


def restore(path: str | os.PathLike[str], **options: Any) -> Any:
    """Return the tree saved at `path`; as `penstock.restore`."""
    return run_once(partial(api.restore, path, **options))


def restore_items(path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Return the values of the items saved at `path`, by name; as `penstock.restore_items`."""
    return run_once(partial(api.restore_items, path, **options))


def metadata(path: str | os.PathLike[str], *, item: str | None = None) -> CheckpointMetadata:
    """Say what the checkpoint at `path` holds; as `penstock.metadata`."""
    return run_once(partial(api.metadata, path, item=item))


def verify(path: str | os.PathLike[str], *, item: str | None = None) -> VerifyReport:
    """Compare the checkpoint at `path` with its checksums; as `penstock.verify`."""
    return run_once(partial(api.verify, path, item=item))


def convert(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], **options: Any
) -> SaveReport:
    """Write what is saved at `source` to `destination`, in another format; as `penstock.convert`."""
    return run_once(partial(api.convert, source, destination, **options))


def export_safetensors(tree: object, destination: str | os.PathLike[str], **options: Any) -> SaveReport:
    """Write a tree as safetensors; as `penstock.export_safetensors`."""
    return run_once(partial(api.export_safetensors, tree, destination, **options))
