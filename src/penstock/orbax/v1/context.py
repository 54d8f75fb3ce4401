"""The current options, as a context manager."""

from __future__ import annotations

__all__ = ("Context", "get_context")

import copy
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Final, TypeVar, final

from penstock.orbax.v1.options import (
    FROZEN_IDS,
    ArrayOptions,
    AsyncOptions,
    AtomicityOptions,
    CheckpointablesOptions,
    CheckpointLayout,
    DeletionOptions,
    FileOptions,
    MemoryOptions,
    MultiprocessingOptions,
    PathwaysOptions,
    PyTreeOptions,
    SafetensorsOptions,
    ids_within,
)

T = TypeVar("T")

_CONTEXT: Final[ContextVar[Context | None]] = ContextVar("penstock_orbax_context", default=None)


def get_context(default: Context | None = None) -> Context:
    """Return the entered context; if there is none, `default` or one with the default options."""
    active = _CONTEXT.get()
    if active is not None:
        return active

    return Context() if default is None else default


@final
class Context:
    """Options for everything that is done inside its `with`, in this thread and this task.

    ```python
    context = ocp.Context()
    context.array.saving.use_zarr3 = False
    with context:
        ocp.save(path, state)
    ```

    A context starts from the defaults, even inside another one, unless that one is passed. While it is
    entered its options cannot be changed.

    Args:
        context: One whose options are copied.
        pytree_options: See `options.PyTreeOptions`; the others likewise.
        array_options: Likewise.
        async_options: Likewise.
        multiprocessing_options: Likewise.
        file_options: Likewise.
        checkpointables_options: Likewise.
        pathways_options: Likewise.
        checkpoint_layout: Likewise, or its name.
        deletion_options: Likewise.
        memory_options: Likewise.
        safetensors_options: Likewise.
        atomicity_options: Likewise.
    """

    def __init__(
        self,
        context: Context | None = None,
        *,
        pytree_options: PyTreeOptions | None = None,
        array_options: ArrayOptions | None = None,
        async_options: AsyncOptions | None = None,
        multiprocessing_options: MultiprocessingOptions | None = None,
        file_options: FileOptions | None = None,
        checkpointables_options: CheckpointablesOptions | None = None,
        pathways_options: PathwaysOptions | None = None,
        checkpoint_layout: CheckpointLayout | str | None = None,
        deletion_options: DeletionOptions | None = None,
        memory_options: MemoryOptions | None = None,
        safetensors_options: SafetensorsOptions | None = None,
        atomicity_options: AtomicityOptions | None = None,
    ) -> None:
        up = context
        layout = None if checkpoint_layout is None else CheckpointLayout(checkpoint_layout)
        self._pytree = _chosen(pytree_options, up and up.pytree, PyTreeOptions)
        self._array = _chosen(array_options, up and up.array, ArrayOptions)
        self._asynchronous = _chosen(async_options, up and up.asynchronous, AsyncOptions)
        self._multiprocessing = _chosen(
            multiprocessing_options, up and up.multiprocessing, MultiprocessingOptions
        )
        self._file = _chosen(file_options, up and up.file, FileOptions)
        self._checkpointables = _chosen(
            checkpointables_options, up and up.checkpointables, CheckpointablesOptions
        )
        self._pathways = _chosen(pathways_options, up and up.pathways, PathwaysOptions)
        self._checkpoint_layout = _chosen(layout, up and up.checkpoint_layout, lambda: CheckpointLayout.ORBAX)
        self._deletion = _chosen(deletion_options, up and up.deletion, DeletionOptions)
        self._memory = _chosen(memory_options, up and up.memory, MemoryOptions)
        self._safetensors = _chosen(safetensors_options, up and up.safetensors, SafetensorsOptions)
        self._atomicity = _chosen(atomicity_options, up and up.atomicity, AtomicityOptions)
        self._entered: list[tuple[Token[Context | None], Token[frozenset[int]]]] = []

    def __enter__(self) -> Context:
        frozen = FROZEN_IDS.get() | {id(self)} | ids_within(*vars(self).values())
        self._entered.append((_CONTEXT.set(self), FROZEN_IDS.set(frozen)))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        context, frozen = self._entered.pop()
        _CONTEXT.reset(context)
        FROZEN_IDS.reset(frozen)

    @property
    def array(self) -> ArrayOptions:
        """The options of arrays."""
        return self._array

    @property
    def asynchronous(self) -> AsyncOptions:
        """The options of work in the background."""
        return self._asynchronous

    @property
    def pytree(self) -> PyTreeOptions:
        """The options of trees."""
        return self._pytree

    @property
    def file(self) -> FileOptions:
        """The options of files and directories."""
        return self._file

    @property
    def multiprocessing(self) -> MultiprocessingOptions:
        """The processes that take part."""
        return self._multiprocessing

    @property
    def checkpointables(self) -> CheckpointablesOptions:
        """The handlers of objects."""
        return self._checkpointables

    @property
    def pathways(self) -> PathwaysOptions:
        """Options of a backend that is not supported. They have no effect."""
        return self._pathways

    @property
    def deletion(self) -> DeletionOptions:
        """The options of deletions."""
        return self._deletion

    @property
    def memory(self) -> MemoryOptions:
        """The limits of memory."""
        return self._memory

    @property
    def safetensors(self) -> SafetensorsOptions:
        """The options of safetensors files."""
        return self._safetensors

    @property
    def atomicity(self) -> AtomicityOptions:
        """The way that a checkpoint becomes visible. It is renamed to its path, whatever this says."""
        return self._atomicity

    @property
    def checkpoint_layout(self) -> CheckpointLayout:
        """The layout of the checkpoints that are loaded."""
        return self._checkpoint_layout

    @checkpoint_layout.setter
    def checkpoint_layout(self, value: CheckpointLayout | str) -> None:
        if id(self) in FROZEN_IDS.get():
            raise RuntimeError("a context in use cannot be changed; set its options before its `with`")

        self._checkpoint_layout = CheckpointLayout(value)

    # Names from before `context.array`, which handlers written for Orbax still read.
    pytree_options = pytree
    array_options = array
    async_options = asynchronous
    multiprocessing_options = multiprocessing
    file_options = file
    checkpointables_options = checkpointables
    pathways_options = pathways
    deletion_options = deletion
    memory_options = memory
    safetensors_options = safetensors


def _chosen(given: T | None, inherited: T | None, default: Callable[[], T]) -> T:
    """Copy the given options, or those of another context; later changes to them have no effect here."""
    if given is not None:
        return copy.deepcopy(given)
    if inherited is not None:
        return copy.deepcopy(inherited)

    return default()
