"""The same for plain scripts, which have no event loop: one runs in a thread meanwhile.

```python
with penstock.sync.Checkpointer() as checkpointer:
    save = checkpointer.save(path, state)   # staged: the state may change now
    report = save.result()                  # durable and visible
```

Every function and method takes what its async original takes.

In a cell of a notebook they work, too, although an event loop runs there. A `Checkpointer` or a
`CheckpointManager` needs no `with` in IPython: the first call opens it, later cells use it, and `close()` or
the end of the interpreter ends it.
"""

from __future__ import annotations

__all__ = (
    "CheckpointManager",
    "Checkpointer",
    "convert",
    "delete",
    "export_safetensors",
    "gc",
    "metadata",
    "repair",
    "restore",
    "restore_items",
    "save",
    "seal",
    "verify",
    "watch",
)

from collections.abc import Iterator
from functools import partial
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, final, overload
from weakref import finalize

from penstock import api
from penstock.blocking.portal import Portal, refuse_running_loop, run_once
from penstock.blocking.sync_steps import CheckpointManager, watch
from penstock.blocking.twins import blocking, blocking_method, parameters_of, shown_as
from penstock.checkpointer.checkpointer import Path
from penstock.checkpointer.parts import RestoreKeywords, RestoreOnceKeywords
from penstock.kernel.messages.restore import Only, Order
from penstock.kernel.pipeline.failures import short_traceback, short_tracebacks
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.leaf import KeyPath
from penstock.tools.convert import convert as _convert
from penstock.tools.delete import delete as _delete
from penstock.tools.export import export_safetensors as _export_safetensors
from penstock.tools.gc import gc as _gc
from penstock.tools.repair import repair as _repair
from penstock.tools.seal import seal as _seal

if TYPE_CHECKING:
    import jax

T = TypeVar("T")


@short_tracebacks
@final
class Checkpointer:
    """`penstock.Checkpointer` for code without an event loop. A context manager, used by any thread.

    `save` returns once the tree is staged; call `.result()` of what it returns for the durable checkpoint.

    Raises:
        RunningLoopError: From every method, if called inside a running event loop, but for a notebook's cell.
    """

    @parameters_of(api.Checkpointer)
    def __init__(self, **options: Any) -> None:
        refuse_running_loop()
        self._inner = api.Checkpointer(**options)
        self._portal = Portal(self._inner, "Checkpointer", self._inner.stopping)
        finalize(self, self._portal.close)  # in a notebook, where nothing else ends it

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

    @overload
    def restore(
        self, path: Path, *, as_type: type[T], like: object = ..., **options: Unpack[RestoreKeywords]
    ) -> T: ...
    @overload
    def restore(self, path: Path, *, like: EllipsisType = ..., **options: Unpack[RestoreKeywords]) -> Any: ...
    @overload
    def restore(self, path: Path, *, like: type[T], **options: Unpack[RestoreKeywords]) -> T: ...
    @overload
    def restore(
        self, path: Path, *, like: jax.ShapeDtypeStruct, **options: Unpack[RestoreKeywords]
    ) -> jax.Array: ...
    @overload
    def restore(self, path: Path, *, like: T, **options: Unpack[RestoreKeywords]) -> T: ...
    @partial(shown_as, api.Checkpointer.restore)
    def restore(self, path: Path, **options: Any) -> Any:
        """Return the tree saved at `path`; takes what `penstock.Checkpointer.restore` takes."""
        return self._portal.call(self._inner.restore, path, **options)

    def stream(
        self,
        path: Path,
        *,
        like: Any = ...,
        order: Order | None = None,
        only: Only | None = None,
        item: str | None = None,
        pipeline: Pipeline[RestoreRun] | None = None,
    ) -> Iterator[tuple[KeyPath, Any]]:
        """Yield the leaves saved at `path`, as pairs of key path and value."""
        open_stream = partial(
            self._inner.stream, path, like=like, order=order, only=only, item=item, pipeline=pipeline
        )
        return self._portal.iterate(open_stream)

    def close(self) -> None:
        """Wait for its saves, and leave it, if it was opened without a `with` in a notebook. Idempotent.

        Raises:
            PenstockError: If a save failed and its failure was not raised yet.
        """
        self._portal.close()

    save = blocking_method(api.Checkpointer.save)
    restore_items = blocking_method(api.Checkpointer.restore_items)
    metadata = blocking_method(api.Checkpointer.metadata)
    verify = blocking_method(api.Checkpointer.verify)
    wait = blocking_method(api.Checkpointer.wait)


@overload
def restore(
    path: Path, *, as_type: type[T], like: object = ..., **options: Unpack[RestoreOnceKeywords]
) -> T: ...
@overload
def restore(path: Path, *, like: EllipsisType = ..., **options: Unpack[RestoreOnceKeywords]) -> Any: ...
@overload
def restore(path: Path, *, like: type[T], **options: Unpack[RestoreOnceKeywords]) -> T: ...
@overload
def restore(
    path: Path, *, like: jax.ShapeDtypeStruct, **options: Unpack[RestoreOnceKeywords]
) -> jax.Array: ...
@overload
def restore(path: Path, *, like: T, **options: Unpack[RestoreOnceKeywords]) -> T: ...
@partial(shown_as, api.restore)
@short_traceback
def restore(path: Path, **options: Any) -> Any:
    """Return the tree saved at `path`; takes what `penstock.restore` takes."""
    return run_once(partial(api.restore, path, **options))


save = blocking(api.save)
restore_items = blocking(api.restore_items)
metadata = blocking(api.metadata)
verify = blocking(api.verify)
convert = blocking(_convert)
delete = blocking(_delete)
gc = blocking(_gc)
export_safetensors = blocking(_export_safetensors)
repair = blocking(_repair)
seal = blocking(_seal)
