"""Handlers for leaves in Orbax's newer form, as stage workers of penstock's pipelines."""

from __future__ import annotations

__all__ = ("CustomLeaves",)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax
from jax import tree_util

from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.kernel.plugins.handler_registry import HandlerRegistry
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, ParamInfo
from penstock.kernel.protocols.leaf_handlers import Waitable
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

_jax: Any = tree_util


@final
@dataclass(slots=True)
class CustomLeaves:
    """The leaf types of a registry that penstock itself does not know.

    Args:
        leaves: The registry.
        context: Given to the handlers, and says what paths are.
        stored: Recorded names of the handlers that saved the leaves of a tree.
        asked: What leaves are asked for as, by their keys.
    """

    leaves: LeafHandlerRegistry
    context: Context
    stored: frozenset[str] = frozenset()
    asked: Mapping[KeyPath, Any] = field(default_factory=dict[KeyPath, Any])

    def types(self) -> Mapping[str, type[Any]]:
        """Return the leaf type for each recorded name that there is a handler for."""
        return {self._recorded(handler): leaf_type for leaf_type, handler in self._entries()}

    def registry(self) -> HandlerRegistry:
        """Return penstock's own handlers, that of arrays as the options have it, and these."""
        registry = default_handlers()
        registry.register(jax.Array, array_handler_of(self.context.array.saving), override=True)
        for leaf_type, handler in self._entries():
            registry.register(leaf_type, self._adapted(handler), override=True)

        return registry

    async def metadata(self, name: str, info: ParamInfo) -> Any:
        """Say what is saved of a leaf that a handler of this recorded name saved."""
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
        try:
            inner: Any = handler(context=self.context)
        except TypeError:
            inner = handler()

        return _AdaptedLeafHandler(inner, self._recorded(handler), self.context, self.asked)


@final
@dataclass(frozen=True, slots=True)
class _AdaptedLeafHandler:
    """A `TypeHandler`, as the kernel takes it, of a `LeafHandler`."""

    inner: Any
    name: str
    context: Context
    asked: Mapping[KeyPath, Any]

    def typestr(self) -> str:
        return self.name

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Waitable]:
        params = [
            SerializationParam(_keypath(info), value) for info, value in zip(infos, values, strict=True)
        ]
        directory = Existing(self._path(infos[0]))
        await (await self.inner.serialize(params, SerializationContext(directory)))
        return []

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        params = [DeserializationParam(_keypath(info), self.asked.get(info.keys)) for info in infos]
        found: Sequence[Any] = await (await self.inner.deserialize(params, self._context(infos[0])))
        return found

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        params = [DeserializationParam[Any](_keypath(info)) for info in infos]
        found: Sequence[Any] = await self.inner.metadata(params, self._context(infos[0]))
        return found

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Nothing: this form of handler has no way to say it."""
        return [(0, 0)] * len(values)

    def finalize(self, directory: str) -> None:
        """Nothing: `serialize` has awaited everything."""

    def _path(self, info: ParamInfo) -> Path:
        return self.context.file.path_class(info.directory)

    def _context(self, info: ParamInfo) -> DeserializationContext:
        saving = self.context.array.saving
        return DeserializationContext(self._path(info), saving.use_ocdbt, saving.use_zarr3)


def _keypath(info: ParamInfo) -> tuple[Any, ...]:
    """Return jax's keys, as far as they are known: an attribute is taken for the key of a dict."""
    return tuple(
        [
            _jax.DictKey(key) if kind is KeyKind.MAPPING else _jax.SequenceKey(int(key))
            for key, kind in zip(info.keys, info.kinds, strict=True)
        ]
    )
