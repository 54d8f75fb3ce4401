"""Orbax's type handlers as handlers in penstock's pipelines, and what they get there.

The handlers of the API stand for those of penstock. A third-party handler, or a subclass that changes
reading or writing, is adapted: it keeps its own files, and has byte limiters and jax's keys as in Orbax.
"""

from __future__ import annotations

__all__ = (
    "ByteLimiter",
    "Limiters",
    "StageTypeHandler",
    "StageWorkers",
    "TypeHandler",
    "TypeHandlerLookup",
    "UnknownTypeError",
    "as_stored",
    "key_entries",
    "leaf_size",
    "save_stages",
)

import ast
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast, final

import jax
from jax import tree_util
from jax.core import Tracer

from penstock import MemoryRegulator, Pipeline, kernel, pipelines
from penstock import handlers as built_in
from penstock.embedding import EMPTY_MARKERS, AdaptedHandler, ByteAccount
from penstock.errors import HandlerError
from penstock.orbax.future import in_thread
from penstock.orbax.item_files import handler_path
from penstock.orbax.leaf_args import ParamInfo, RestoreArgs, SaveArgs
from penstock.orbax.serialization import MergeProcessFiles, get_ts_context

_tree: Any = tree_util  # jax declares no types for it

_OURS: Final = __name__.rpartition(".")[0] + "."

_NODES: Final[frozenset[type]] = frozenset({dict, list, tuple, type(None), jax.ShapeDtypeStruct, Tracer})

_WITH_A_PLACE: Final = ("jax.Array", "np.ndarray", "scalar", "string")

_READS_AND_WRITES: Final = (
    *("serialize", "deserialize", "finalize"),
    *("_get_json_tspec_write", "_get_json_tspec_read"),  # programs override these alone
)
"""The methods of a type handler by which it does its work."""


@lru_cache  # values; to check their options takes a caller of `save` longer than to copy a small tree
def save_stages(*, merges: bool = False, file_bytes: int | None = None) -> Pipeline[kernel.SaveRun]:
    """Return the stages of a save. Its caller waits for the copies, and not for what is done with them.

    Args:
        merges: Whether type handlers may write databases of their own, which are merged.
        file_bytes: Bytes after which a data file is followed by another; None for the usual length.
    """
    pipeline = pipelines.save_pipeline().configure("device_to_host", copies_first=True)
    if file_bytes is not None:
        pipeline = pipeline.configure("write", file_bytes=file_bytes)

    return pipeline.insert_after("commit", MergeProcessFiles(), called="merge") if merges else pipeline


def _no_args(name: str) -> None:
    """Ask nothing special of a leaf."""


class TypeHandler(ABC):
    """Writes and reads the leaves of one type. Subclass it for a type of your own.

    Leaves come in batches, each leaf with a `ParamInfo` that says where it is stored. Files go
    into `info.parent_dir`, named after `info.name`.
    """

    @abstractmethod
    def typestr(self) -> str:
        """The recorded name of the type, by which a restore finds the handler."""

    @abstractmethod
    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe stored leaves without reading them: a `Metadata` for each."""

    @abstractmethod
    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[kernel.Waitable]:
        """Begin to write values; return once they are copied and may change.

        Returns:
            Futures that are done once everything is written. Their work is already running.
        """

    @abstractmethod
    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read values, in the order of `infos`."""

    def finalize(self, directory: Any) -> None:
        """Complete the files in `directory`: called once per save, when every future is done."""
        return

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return for each value the bytes of host memory that writing and reading it take.

        By default the size that the value itself reports, or else that of the Python object.
        """
        return [(leaf_size(value), leaf_size(value)) for value in values]

    def stage_worker(self) -> Any:
        """Return the pipeline handler of such leaves; called by penstock's registry."""
        return StageWorkers().of(self)


class UnknownTypeError(HandlerError, TypeError, ValueError):
    """A leaf's type has no handler. Orbax raises a `ValueError` here, penstock a `TypeError`; it is both.

    Attributes:
        key_path: The leaf.
        type_: Its type, or the stored name of its type.
    """

    def __init__(self, key_path: str, type_: type | str) -> None:
        what = (
            f"{type_.__module__}.{type_.__qualname__}"
            if isinstance(type_, type)
            else f"the stored type {type_!r}"
        )
        super().__init__(f"{key_path or 'the whole tree'}: no type handler is registered for {what}")
        self.key_path, self.type_ = key_path, type_


@final
@dataclass(frozen=True, slots=True)
class StageWorkers:
    """Makes workers of type handlers, for one save or restore.

    Attributes:
        use_ocdbt: Whether the checkpoint is a database; None to look for one.
        use_zarr3: Whether its arrays are of zarr version 3.
        use_compression: Whether they are compressed.
        ocdbt_target_data_file_size: See `ParamInfo`.
        save_args: Returns those of a leaf by its stored name; None for the defaults.
        restore_args: Likewise.
        ts_context: See `ParamInfo`.
        limiters: The byte limiters of this save or restore; None for no limits.
    """

    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    use_compression: bool = True
    ocdbt_target_data_file_size: int | None = None
    save_args: Callable[[str], SaveArgs | None] = _no_args
    restore_args: Callable[[str], RestoreArgs | None] = _no_args
    ts_context: Any = field(default_factory=get_ts_context)
    limiters: Limiters | None = None

    def of(self, handler: Any) -> kernel.LeafHandler:
        """Return the pipeline handler for the leaves of `handler`."""
        class_ = next((c for c in type(handler).__mro__ if c.__module__.startswith(_OURS)), None)
        if class_ is not None and _keeps(handler, class_, *_READS_AND_WRITES):
            native = getattr(handler, "leaf_handler", None)
            if native is not None:
                return cast("kernel.LeafHandler", native)

        return AdaptedHandler(StageTypeHandler(handler, self))

    def info(self, info: kernel.ParamInfo, typestr: str, *, use_ocdbt: bool) -> ParamInfo:
        """Make Orbax's `ParamInfo` of a leaf in a pipeline."""
        limiters = self.limiters
        return ParamInfo(
            name=info.name,
            parent_dir=handler_path(info.directory),
            keypath=key_entries(info),
            skip_deserialize=False,
            byte_limiter=None if limiters is None else limiters.in_flight,
            device_host_byte_limiter=None if limiters is None else limiters.device_host,
            is_ocdbt_checkpoint=use_ocdbt,
            use_compression=self.use_compression,
            use_zarr3=self.use_zarr3,
            ocdbt_target_data_file_size=self.ocdbt_target_data_file_size,
            ts_context=self.ts_context,
            value_typestr=typestr,
        )


@final
class StageTypeHandler:
    """Orbax's type handler as a handler of the kernel.

    Args:
        inner: Has `typestr`, `serialize`, `deserialize`, `metadata`; perhaps `finalize`, `memory_size`.
        workers: Makes the `ParamInfo`s of its leaves.
    """

    __slots__ = ("inner", "workers")

    def __init__(self, inner: Any, workers: StageWorkers) -> None:
        self.inner = inner
        self.workers = workers

    @property
    def every_process(self) -> bool:
        """Orbax calls `serialize` in every process, and handlers look which one they are in."""
        return True

    @property
    def handler_class(self) -> type:
        """The class that errors name."""
        return type(self.inner)  # pyright: ignore[reportUnknownVariableType]  # anybody's

    def typestr(self) -> str:
        return str(self.inner.typestr())

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[kernel.ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[kernel.Waitable]:
        asked = self.workers.save_args
        args = [asked(info.name) or SaveArgs() for info in infos] if args is None else args
        use_ocdbt = self.workers.use_ocdbt is not False
        return cast(
            "Sequence[kernel.Waitable]",
            await self.inner.serialize(list(values), self._infos(infos, use_ocdbt=use_ocdbt), args),
        )

    async def deserialize(
        self, infos: Sequence[kernel.ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        asked = self.workers.restore_args
        args = [asked(info.name) or RestoreArgs() for info in infos] if args is None else args
        found = await self._stored_infos(infos)
        return cast("Sequence[Any]", await self.inner.deserialize(found, args))

    async def metadata(self, infos: Sequence[kernel.ParamInfo]) -> Sequence[Any]:
        return cast("Sequence[Any]", await self.inner.metadata(await self._stored_infos(infos)))

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        size = getattr(self.inner, "memory_size", None)
        if size is None:
            return [(leaf_size(value), leaf_size(value)) for value in values]

        return cast("Sequence[tuple[int, int]]", size(values))

    def finalize(self, directory: str) -> None:
        finalize = getattr(self.inner, "finalize", None)
        if finalize is not None:
            finalize(handler_path(directory))

    def _infos(self, infos: Sequence[kernel.ParamInfo], *, use_ocdbt: bool) -> list[ParamInfo]:
        typestr = self.typestr()
        return [self.workers.info(info, typestr, use_ocdbt=use_ocdbt) for info in infos]

    async def _stored_infos(self, infos: Sequence[kernel.ParamInfo]) -> list[ParamInfo]:
        use_ocdbt = self.workers.use_ocdbt
        if use_ocdbt is None:
            use_ocdbt = await in_thread((Path(infos[0].directory) / "manifest.ocdbt").exists)

        return self._infos(infos, use_ocdbt=use_ocdbt)


@final
class TypeHandlerLookup:
    """Orbax's registry as a lookup of the kernel: the first entry that fits a type counts.

    Args:
        registry: Has `get` and `has`, by type and by stored type name.
        workers: Makes workers of what it has, for one save or restore.
    """

    __slots__ = ("_handlers", "_nodes", "_registry", "_types", "_workers")

    def __init__(self, registry: Any, workers: StageWorkers | None = None) -> None:
        self._registry = registry
        self._workers = workers or StageWorkers()
        self._nodes: kernel.HandlerLookup | None = None  # of penstock; made when one is needed
        self._types: dict[type | str, kernel.LeafHandler] = {}
        self._handlers: dict[int, kernel.LeafHandler] = {}  # by identity of what was registered

    def lookup(self, type_: type, key_path: str) -> kernel.LeafHandler:
        """Find the handler for a leaf of this type, or of what a class of `as_stored` stands for.

        Raises:
            UnknownTypeError: If there is none.
        """
        return self._find(getattr(type_, _TYPESTR, type_), key_path)

    def for_typestr(self, typestr: str, key_path: str) -> kernel.LeafHandler:
        """Find the handler that wrote a leaf.

        Raises:
            UnknownTypeError: If there is none.
        """
        return self._find(typestr, key_path)

    def own_files(self) -> frozenset[str]:
        """The types of leaves with a place in the layout that a handler here may keep in its own files."""
        known = [typestr for typestr in _WITH_A_PLACE if self._registry.has(typestr)]
        return frozenset(name for name in known if isinstance(self._find(name, ""), AdaptedHandler))

    def _find(self, kind: type | str, key_path: str) -> kernel.LeafHandler:
        if kind not in self._types:
            self._types[kind] = self._made(kind, key_path)

        return self._types[kind]

    def _made(self, kind: type | str, key_path: str) -> kernel.LeafHandler:
        if self._registry.has(kind):
            handler = self._registry.get(kind)
            if id(handler) not in self._handlers:  # one for all its types: they are one batch
                self._handlers[id(handler)] = self._workers.of(handler)

            return self._handlers[id(handler)]
        if isinstance(kind, str):
            if kind in EMPTY_MARKERS:
                return self._own().for_typestr(kind, key_path)
            raise UnknownTypeError(key_path, kind)

        if _NODES & {*kind.__mro__}:
            return self._own().lookup(kind, key_path)  # no leaf, or one whose error says more

        raise UnknownTypeError(key_path, kind)

    def _own(self) -> kernel.HandlerLookup:
        if self._nodes is None:
            self._nodes = built_in.default_handlers(entry_points=False)

        return self._nodes


def _keeps(handler: object, class_: type, *names: str) -> bool:
    """Return whether a handler has a class's own methods of these names, not overridden."""
    return all(
        getattr(type(handler), name, None) is getattr(class_, name, None) and name not in vars(handler)
        for name in names
    )


@lru_cache(maxsize=64)
def as_stored(typestr: str) -> type:
    """Return a class that, in a target, has a leaf restored by the handler that wrote it."""
    return type(f"as stored: {typestr}", (), {_TYPESTR: typestr})


_TYPESTR: Final = "_penstock_stored_typestr"

Flow: TypeAlias = Literal["save", "restore"]


@final
class ByteLimiter:
    """Orbax's `ByteLimiter` over an account of penstock's. For one event loop.

    Args:
        account: Where the bytes come from.
    """

    __slots__ = ("_account", "_held")

    def __init__(self, account: ByteAccount) -> None:
        self._account = account
        self._held: list[Any] = []

    @property
    def max_bytes(self) -> int:
        """Bytes that may be reserved at once."""
        return self._account.limit

    async def wait_for_bytes(self, requested_bytes: int) -> None:
        """Wait until so many bytes are free, and reserve them.

        A request above the limit is not refused: it waits until nothing else is reserved.

        Cancellation:
            Reserves nothing.
        """
        lease = await self._account.acquire(requested_bytes, admit_oversize=True)
        self._held.append(lease)

    async def release_bytes(self, requested_bytes: int) -> None:
        """Release bytes. Never waits.

        Raises:
            ValueError: If more are released than are reserved.
        """
        missing = requested_bytes
        while missing and self._held:
            lease = self._held[-1]
            with lease.split(min(missing, lease.nbytes)) as part:
                missing -= part.nbytes

            if not lease.nbytes:
                self._held.pop()

        if missing:
            raise ValueError(f"{requested_bytes} bytes were released, {missing} more than were reserved")


@final
@dataclass(frozen=True, slots=True)
class Limiters:
    """The byte limiters that handlers get in one save or restore, as large as its memory budget.

    They have accounts of their own. A handler's leaves are leased already when it is called, so it must
    not wait for the budget again, or it could wait for itself. What it never releases ends with the call.

    Attributes:
        in_flight: Bounds the bytes being written or read.
        device_host: Bounds the bytes being copied from devices.
    """

    in_flight: ByteLimiter
    device_host: ByteLimiter

    @classmethod
    def of(cls, memory: MemoryRegulator, flow: Flow) -> Limiters:
        """Make the limiters of one save or restore."""
        in_flight, held = memory.in_flight(flow).limit, memory.limit_of(flow)
        return cls(ByteLimiter(ByteAccount(in_flight)), ByteLimiter(ByteAccount(held)))


def leaf_size(value: object) -> int:
    """Return the bytes of a value: its `nbytes`, or else the size of the Python object."""
    nbytes = getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value)


def key_entries(info: kernel.ParamInfo) -> tuple[Any, ...]:
    """Return the key path of a leaf as `jax.tree_util` has it: `DictKey`, `SequenceKey`, `GetAttrKey`, ...

    Of a leaf that is saved these are the entries of its tree. Of one that is restored they are what
    the checkpoint knows: there an attribute is recorded as the key of a dict.

    Args:
        info: Its `key_path` is what `jax.tree_util.keystr` prints, perhaps with more in front: keys are
            compared from the last to the first.
    """
    entries: list[Any] = []
    text = info.key_path
    for key, kind in zip(reversed(info.keys), reversed(info.kinds), strict=True):
        for entry in _candidates(key, kind):
            shown = str(entry)
            if text.endswith(shown):
                text = text[: -len(shown)]
                break
        else:  # a custom entry, or a key that is not a string
            entry = _tree.DictKey(key) if kind is kernel.KeyKind.MAPPING else _tree.SequenceKey(int(key))

        entries.append(entry)

    entries.reverse()
    return tuple(entries)


def _candidates(key: str, kind: kernel.KeyKind) -> Iterator[Any]:
    if kind is not kernel.KeyKind.MAPPING:
        yield _tree.SequenceKey(int(key))
        yield _tree.FlattenedIndexKey(int(key))
        return

    yield _tree.DictKey(key)
    yield _tree.GetAttrKey(key)
    try:
        yield _tree.DictKey(ast.literal_eval(key))  # a number, or a bool
    except (ValueError, SyntaxError):
        return
