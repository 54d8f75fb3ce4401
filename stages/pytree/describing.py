"""Describes the leaves of a tree in columns. A tree that was saved before is mostly only compared."""

from __future__ import annotations

__all__ = ("Describer", "SavedTrees")

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Final, TypeAlias, final

from penstock.kernel.config.save_format import SaveArgs
from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.layouts import FormattedLayout
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import ChunkingHandler, LeafHandler, SigningHandler


@final
class Describer:
    """Finds the handler and the spec of each leaf of a tree.

    Args:
        run: The save.
        asked: The options of each leaf; empty if there are none.
    """

    __slots__ = ("_asked", "_kinds", "_layout", "_registry")

    def __init__(self, run: SaveRun, asked: Sequence[SaveArgs | None]) -> None:
        self._layout = run.layout if isinstance(run.layout, FormattedLayout) else None
        self._asked = asked
        self._registry = run.registry
        self._kinds: dict[type, _Kind] = {}

    def describe(
        self, infos: Sequence[ParamInfo], values: Sequence[object], known: SavedTree | None
    ) -> SavedTree:
        """Describe every leaf. Blocking.

        Args:
            infos: Where they stand.
            values: The leaves.
            known: A tree of this structure that was saved before.

        Returns:
            `known` itself if nothing differs. Leaves of one signature share one spec.

        Raises:
            HandlerError: If no handler takes a leaf's type.
            SpecError: If a leaf cannot be stored, or not as asked for.
        """
        specs: list[LeafSpec] = []
        handlers: list[LeafHandler] = []
        kinds, signed = self._kinds, dict[int, Mapping[object, LeafSpec]]() if known is None else known.signed
        for index, value in enumerate(values):
            kind = kinds.get(type(value))
            if kind is None:
                kind = kinds[type(value)] = self._kind(type(value), infos[index], signed)

            handlers.append(kind.handler)
            specs.append(self._spec(kind, value, index, infos))

        if known is not None and all(map(is_, handlers, known.handlers)):
            before = known.specs
            if all(map(is_, specs, before)):
                return known

            specs = [old if old == spec else spec for old, spec in zip(before, specs, strict=True)]
            if all(map(is_, specs, before)):
                return known

        coded = any(spec.codec is not None for spec in {id(spec): spec for spec in specs}.values())
        found = {id(kind.handler): kind.signed for kind in kinds.values()}
        return SavedTree(infos, specs, handlers, self._asked, coded, found)

    def _spec(self, kind: _Kind, value: object, index: int, infos: Sequence[ParamInfo]) -> LeafSpec:
        """Return how a value is stored; one object for all leaves of one signature and one `SaveArgs`."""
        asked = self._asked[index] if self._asked else None
        signature = None if kind.sign is None else kind.sign(value)
        if signature is None:
            return self._described(kind, value, infos[index], asked)

        key = signature if asked is None else (signature, _Identity(asked))
        try:
            spec = kind.signed.get(key)
        except TypeError:  # a signature need not be hashable
            return self._described(kind, value, infos[index], asked)

        if spec is None:
            spec = kind.before.get(key)
            if spec is None:
                spec = self._described(kind, value, infos[index], asked)

            kind.signed[key] = spec

        return spec

    def _described(self, kind: _Kind, value: object, info: ParamInfo, asked: SaveArgs | None) -> LeafSpec:
        spec = kind.handler.describe(value, info)
        if spec.shape is None:
            return spec
        if self._layout is not None and kind.follows_spec:
            return self._layout.fit(spec, info, asked)
        if asked is not None and asked.dtype is not None:
            problem = "neither its handler nor the layout can store it in another dtype than its own"
            raise InvalidLeafError(info.key_path, problem)

        return spec

    def _kind(self, type_: type, info: ParamInfo, signed: Signed) -> _Kind:
        handler = self._registry.lookup(type_, info.key_path)
        return _Kind(
            handler,
            handler.signature if isinstance(handler, SigningHandler) else None,
            isinstance(handler, ChunkingHandler) and handler.follows_spec,
            signed.get(id(handler), {}),
        )


@final
@dataclass(frozen=True, slots=True)
class _Identity:
    """Options, as a key that compares them by identity: they need not be hashable."""

    asked: SaveArgs = field(compare=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", id(self.asked))


@final
@dataclass(frozen=True, slots=True)
class _Kind:
    """The facts about all values of one type."""

    handler: LeafHandler
    sign: Callable[[Any], object] | None  #: the handler's `signature`, if it has one
    follows_spec: bool  #: whether it honours the layout's chunks and dtype
    before: Mapping[object, LeafSpec]  #: the spec of each signature in the tree that was saved before
    signed: dict[object, LeafSpec] = field(default_factory=dict[object, LeafSpec])  #: and in this one


_BYTES_OF_A_LEAF: Final = 32  # two references, and a part in specs that are shared


Signed: TypeAlias = Mapping[int, Mapping[object, LeafSpec]]
"""The spec of each signature, by the identity of the handler that gave it."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class SavedTree:
    """The leaves of one tree, without their values."""

    infos: Sequence[ParamInfo]  #: the same object that the structure cache returns for this structure
    specs: Sequence[LeafSpec]
    handlers: Sequence[LeafHandler]
    save_args: Sequence[object] = ()  #: one for each leaf; empty if there were none
    coded: bool = False  #: whether any leaf has a codec
    signed: Signed = field(default_factory=dict[int, Mapping[object, LeafSpec]])
    is_local: bool = False  #: whether each process writes all that it holds, on a disk of its own


@final
class SavedTrees:
    """Remembers the last few trees that were saved. Thread-safe.

    Args:
        most: Trees to remember.
    """

    __slots__ = ("_known",)

    def __init__(self, most: int = 4) -> None:
        self._known: BoundedCache[ByIdentity, SavedTree] = BoundedCache(most)

    @property
    def caches(self) -> Sequence[BoundedCache[Any, Any]]:
        """See `Caching`."""
        return (self._known,)

    def find(self, infos: Sequence[ParamInfo]) -> SavedTree | None:
        """Return the tree that was saved last with this `infos` object; None if it is not known."""
        return self._known.get(ByIdentity(infos))

    def keep(self, tree: SavedTree) -> None:
        """Remember `tree`; it replaces an earlier tree of the same structure."""
        self._known.put(ByIdentity(tree.infos), tree, _BYTES_OF_A_LEAF * len(tree.specs))
