"""Orbax's type handlers as workers in penstock's pipelines.

The handlers of the API stand for penstock's own streaming handlers. A third-party handler, or a subclass
that changes reading or writing, is adapted: it keeps its own files.
"""

from __future__ import annotations

__all__ = ("StageRegistry", "StageTypeHandler", "StageWorkers", "UnknownTypeError", "as_stored")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast, final

import jax
from jax.core import Tracer

from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.kernel.errors import HandlerError
from penstock.kernel.plugins.adapted_handler import AdaptedHandler
from penstock.kernel.plugins.handler_entries import type_name
from penstock.kernel.protocols.leaf import EMPTY_MARKERS
from penstock.kernel.protocols.leaf import ParamInfo as KernelInfo
from penstock.kernel.protocols.leaf_handlers import HandlerLookup, LeafHandler, Waitable
from penstock.orbax.common.background_work import in_thread
from penstock.orbax.common.byte_limiters import Limiters, leaf_size
from penstock.orbax.common.handler_paths import handler_path
from penstock.orbax.common.key_entries import key_entries
from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs, SaveArgs
from penstock.orbax.v0.leaf_handlers.tensorstore_specs import get_ts_context

_OURS: Final = __name__.rpartition(".")[0] + "."
_NODES: Final[frozenset[type]] = frozenset({dict, list, tuple, type(None), jax.ShapeDtypeStruct, Tracer})
_WITH_A_PLACE: Final = ("jax.Array", "np.ndarray", "scalar", "string")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class UnknownTypeError(HandlerError, TypeError, ValueError):
    """A leaf's type has no handler. Orbax raises a `ValueError` here, penstock a `TypeError`; it is both.

    Attributes:
        key_path: The leaf.
        type_: Its type, or the stored name of its type.
    """

    def __init__(self, key_path: str, type_: type | str) -> None:
        what = type_name(type_) if isinstance(type_, type) else f"the stored type {type_!r}"
        super().__init__(f"{key_path}: no type handler is registered for {what}")
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
        save_args: By stored name.
        restore_args: By stored name.
        ts_context: See `ParamInfo`.
        limiters: The byte limiters of this save or restore; None for no limits.
    """

    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    use_compression: bool = True
    ocdbt_target_data_file_size: int | None = None
    save_args: Mapping[str, SaveArgs] = field(default_factory=lambda: _NOTHING)
    restore_args: Mapping[str, RestoreArgs] = field(default_factory=lambda: _NOTHING)
    ts_context: Any = field(default_factory=get_ts_context)
    limiters: Limiters | None = None

    def of(self, handler: Any) -> LeafHandler:
        """Return the pipeline handler for the leaves of `handler`."""
        class_ = next((c for c in type(handler).__mro__ if c.__module__.startswith(_OURS)), None)
        if class_ is not None and _keeps(handler, class_, "serialize", "deserialize", "finalize"):
            native = getattr(handler, "leaf_handler", None)
            if native is not None:
                return cast("LeafHandler", native)

        return AdaptedHandler(StageTypeHandler(handler, self))

    def info(self, info: KernelInfo, typestr: str, *, use_ocdbt: bool) -> ParamInfo:
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
    """Orbax's type handler behind the kernel's handler protocol.

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
        self, values: Sequence[Any], infos: Sequence[KernelInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Waitable]:
        asked = self.workers.save_args
        args = [asked.get(info.name) or SaveArgs() for info in infos] if args is None else args
        use_ocdbt = self.workers.use_ocdbt is not False
        return cast(
            "Sequence[Waitable]",
            await self.inner.serialize(list(values), self._infos(infos, use_ocdbt=use_ocdbt), args),
        )

    async def deserialize(
        self, infos: Sequence[KernelInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        asked = self.workers.restore_args
        args = [asked.get(info.name) or RestoreArgs() for info in infos] if args is None else args
        found = await self._stored_infos(infos)
        return cast("Sequence[Any]", await self.inner.deserialize(found, args))

    async def metadata(self, infos: Sequence[KernelInfo]) -> Sequence[Any]:
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

    def _infos(self, infos: Sequence[KernelInfo], *, use_ocdbt: bool) -> list[ParamInfo]:
        typestr = self.typestr()
        return [self.workers.info(info, typestr, use_ocdbt=use_ocdbt) for info in infos]

    async def _stored_infos(self, infos: Sequence[KernelInfo]) -> list[ParamInfo]:
        use_ocdbt = self.workers.use_ocdbt
        if use_ocdbt is None:
            use_ocdbt = await in_thread((Path(infos[0].directory) / "manifest.ocdbt").exists)

        return self._infos(infos, use_ocdbt=use_ocdbt)


@final
class StageRegistry:
    """Orbax's registry behind the kernel's lookup protocol: the first entry that fits a type counts.

    Args:
        registry: Has `get` and `has`, by type and by stored type name.
        workers: Makes workers of what it has.
    """

    __slots__ = ("_handlers", "_nodes", "_registry", "_types", "_workers")

    def __init__(self, registry: Any, workers: StageWorkers) -> None:
        self._registry = registry
        self._workers = workers
        self._nodes: HandlerLookup | None = None  # of penstock; made when one is needed
        self._types: dict[type | str, LeafHandler] = {}
        self._handlers: dict[int, LeafHandler] = {}  # by identity of what was registered

    def lookup(self, type_: type, key_path: str) -> LeafHandler:
        """Find the handler for a leaf of this type, or of what a class of `as_stored` stands for.

        Raises:
            UnknownTypeError: If there is none.
        """
        return self._find(getattr(type_, _TYPESTR, type_), key_path)

    def for_typestr(self, typestr: str, key_path: str) -> LeafHandler:
        """Find the handler that wrote a leaf.

        Raises:
            UnknownTypeError: If there is none.
        """
        return self._find(typestr, key_path)

    def own_files(self) -> frozenset[str]:
        """The types of leaves with a place in the layout that a handler here may keep in files of its own."""
        known = [typestr for typestr in _WITH_A_PLACE if self._registry.has(typestr)]
        return frozenset(name for name in known if isinstance(self._find(name, ""), AdaptedHandler))

    def _find(self, kind: type | str, key_path: str) -> LeafHandler:
        if kind not in self._types:
            self._types[kind] = self._made(kind, key_path)

        return self._types[kind]

    def _made(self, kind: type | str, key_path: str) -> LeafHandler:
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

    def _own(self) -> HandlerLookup:
        if self._nodes is None:
            self._nodes = default_handlers(entry_points=False)

        return self._nodes


def _keeps(handler: object, class_: type, *names: str) -> bool:
    """Whether a handler has a class's own methods of these names, not overridden."""
    return all(
        getattr(type(handler), name) is getattr(class_, name) and name not in vars(handler) for name in names
    )


@lru_cache(maxsize=64)
def as_stored(typestr: str) -> type:
    """Return a class that, in a target, has a leaf restored by the handler that wrote it."""
    return type(f"as stored: {typestr}", (), {_TYPESTR: typestr})


_TYPESTR: Final = "_penstock_stored_typestr"
