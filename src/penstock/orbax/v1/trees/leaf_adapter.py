"""v1's leaf handlers as handlers of penstock's pipelines."""

from __future__ import annotations

__all__ = ("CustomLeaves",)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax

from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.kernel.plugins.handler_registry import HandlerRegistry
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo
from penstock.kernel.protocols.leaf_handlers import Waitable
from penstock.orbax.common.byte_limiters import Limiters, leaf_size
from penstock.orbax.common.key_entries import key_entries
from penstock.orbax.v0.leaf_handlers.tensorstore_specs import get_ts_context
from penstock.orbax.v1.common.handler_directories import Existing
from penstock.orbax.v1.common.handler_types import typestr
from penstock.orbax.v1.common.path_types import Path
from penstock.orbax.v1.context.array_options import array_handler_of
from penstock.orbax.v1.context.context import Context
from penstock.orbax.v1.trees.leaf_registry import BUILT_IN, LeafHandlerRegistry
from penstock.orbax.v1.trees.leaf_serialization import (
    DeserializationContext,
    DeserializationParam,
    SerializationContext,
    SerializationParam,
)


@final
@dataclass(slots=True)
class CustomLeaves:
    """The leaf types of a registry that penstock itself does not handle.

    Args:
        leaves: The registry.
        context: Given to the handlers; also has the class of paths.
        stored: Recorded names of the handlers that saved the leaves of a tree.
        asked: The requested abstract leaves, by their keys.
        limiters: Given to the handlers; None for no limits.
    """

    leaves: LeafHandlerRegistry
    context: Context
    stored: frozenset[str] = frozenset()
    asked: Mapping[KeyPath, Any] = field(default_factory=dict[KeyPath, Any])
    limiters: Limiters | None = None
    _made: dict[type[Any], _AdaptedLeafHandler] = field(
        default_factory=dict["type[Any]", "_AdaptedLeafHandler"], init=False, repr=False
    )

    def types(self) -> Mapping[str, type[Any]]:
        """Return the leaf type of each recorded name that has a handler."""
        return {self._recorded(handler): leaf_type for leaf_type, handler in self._entries()}

    def registry(self) -> HandlerRegistry:
        """Return penstock's own handlers, with the options applied to that of arrays, and these."""
        registry = default_handlers()
        registry.register(jax.Array, array_handler_of(self.context.array.saving), override=True)
        for leaf_type, handler in self._entries():
            registry.register(leaf_type, self._adapted(handler), override=True)

        return registry

    async def metadata(self, name: str, info: ParamInfo) -> Any:
        """Describe a leaf saved by the handler with this recorded name."""
        handler = next((one for _, one in self._entries() if self._recorded(one) == name), None)
        if handler is None:
            return name

        (found,) = await self._adapted(handler).metadata([info])
        return found

    def _entries(self) -> list[tuple[type[Any], type[Any]]]:
        entries = self.leaves.get_all()
        return [(leaf, handler) for leaf, _, handler in entries if handler not in BUILT_IN]

    def _recorded(self, handler: type[Any]) -> str:
        names = [typestr(handler), *self.leaves.get_secondary_typestrs(handler)]
        return next((name for name in names if name in self.stored), names[0])

    def _adapted(self, handler: type[Any]) -> _AdaptedLeafHandler:
        """Make a handler, one for all its types, so that their leaves are one batch."""
        if handler not in self._made:
            try:
                inner: Any = handler(context=self.context)
            except TypeError:
                inner = handler()

            self._made[handler] = _AdaptedLeafHandler(inner, self._recorded(handler), self)

        return self._made[handler]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _AdaptedLeafHandler:
    """A `LeafHandler` behind the kernel's handler protocol."""

    inner: Any
    name: str
    call: CustomLeaves  #: the save or restore

    @property
    def handler_class(self) -> type:
        """The class that errors name."""
        return type(self.inner)  # pyright: ignore[reportUnknownVariableType]  # anybody's

    def typestr(self) -> str:
        return self.name

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Waitable]:
        params = [
            SerializationParam(key_entries(info), value) for info, value in zip(infos, values, strict=True)
        ]
        directory = Existing(self._path(infos[0]))
        limiters = self.call.limiters
        context = SerializationContext(directory, ts_context=get_ts_context())
        if limiters is not None:
            context.byte_limiter = limiters.in_flight
            context.device_host_byte_limiter = limiters.device_host

        await (await self.inner.serialize(params, context))
        return []

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        params = [DeserializationParam(key_entries(info), self.call.asked.get(info.keys)) for info in infos]
        found: Sequence[Any] = await (await self.inner.deserialize(params, self._context(infos[0])))
        return found

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        params = [DeserializationParam[Any](key_entries(info)) for info in infos]
        found: Sequence[Any] = await self.inner.metadata(params, self._context(infos[0]))
        return found

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return the sizes of the values: a `LeafHandler` does not know more."""
        return [(leaf_size(value), leaf_size(value)) for value in values]

    def finalize(self, directory: str) -> None:
        """Do nothing: `serialize` has awaited everything."""

    def _path(self, info: ParamInfo) -> Path:
        return self.call.context.file.path_class(info.directory)

    def _context(self, info: ParamInfo) -> DeserializationContext:
        saving, limiters = self.call.context.array.saving, self.call.limiters
        byte_limiter = None if limiters is None else limiters.in_flight
        return DeserializationContext(
            self._path(info),
            saving.use_ocdbt,
            saving.use_zarr3,
            ts_context=get_ts_context(),
            byte_limiter=byte_limiter,
        )
