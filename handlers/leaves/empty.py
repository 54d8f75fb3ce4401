"""Leaves without a value: None and empty containers."""

from __future__ import annotations

__all__ = ("EmptyHandler", "EmptyNamedTuple")

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast, final

from penstock.handlers.leaves.stored_value import different, type_name
from penstock.kernel.errors import InvalidLeafError, TreeDifference
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredRows
from penstock.kernel.protocols.leaf_handlers import Leaf, ReadLeaves
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.written import PiecePlan

Marker: TypeAlias = Literal["None", "Dict", "List", "Tuple", "NamedTuple"]

# Which stored markers an empty target accepts. Structures are compared in their stored form, in which
# a list equals a tuple, and a namedtuple equals a dict. An empty namedtuple is stored as None, and so
# was an empty tuple before Orbax 0.8.
_ACCEPTS: Final[Mapping[str, frozenset[str]]] = {
    "None": frozenset({"None", "NamedTuple"}),
    "NamedTuple": frozenset({"None", "NamedTuple", "Dict", "Tuple"}),
    "Tuple": frozenset({"Tuple", "List", "None"}),
    "List": frozenset({"List", "Tuple"}),
    "Dict": frozenset({"Dict", "NamedTuple"}),
}


@final
class EmptyNamedTuple:
    """The type under which all namedtuples without fields are registered, as they have no common type."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class EmptyHandler:
    """Stores an empty leaf as a type name, without pieces or regions.

    Args:
        typestr: The marker that this instance is registered for. All instances behave alike.
    """

    typestr: Marker = "None"

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        """Return the markers to store for None, `{}`, `[]`, `()` and empty namedtuples.

        Raises:
            InvalidLeafError: If a container is not empty.
        """
        specs: list[LeafSpec] = []
        for number, value in enumerate(values):
            marker = _marker(value)
            if marker is None or (value is not None and len(value)):
                raise InvalidLeafError(
                    infos[number].key_path,
                    f"a {type_name(value)} with content is no leaf; let it be a node of the tree",
                )

            # A namedtuple without fields is stored as None, as in Orbax's default format.
            name = "None" if marker == "NamedTuple" else marker
            spec = known.get(name)
            if spec is None:
                spec = known[name] = LeafSpec(name)

            specs.append(spec)

        return specs

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        return iter(())

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        """Accept empty targets for stored empty leaves; the restored values equal the targets.

        An empty target where an array is stored is a difference: the array is not silently skipped.
        """
        if likes is None:
            return [Target(detail=_default(spec.typestr)) for spec in stored.specs]

        targets: list[Target | TreeDifference] = []
        for at, like in enumerate(likes):
            empty = _instance(like)
            marker = _marker(empty)
            if marker is None or stored.specs[at].typestr not in _ACCEPTS[marker]:
                in_like = "None" if like is None else f"empty {_name(like)}"
                targets.append(different("type", stored[at], in_like))
            else:
                targets.append(Target(detail=empty))

        return targets

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        """Return the empty values, a new object for each mutable one."""
        return [copy.copy(leaf.target.detail) for leaf in leaves]


def _marker(value: object) -> Marker | None:
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return "NamedTuple" if isinstance(getattr(cast("object", value), "_fields", None), tuple) else "Tuple"
    if isinstance(value, list):
        return "List"
    if isinstance(value, dict):
        return "Dict"

    return None


def _instance(like: Any) -> object:
    """The empty value that a target stands for: the target itself or, for a type, its empty instance."""
    if not isinstance(like, type):
        return like

    return None if like is type(None) else like()


def _default(typestr: str) -> object:
    match typestr:
        case "Dict":
            return {}
        case "List":
            return []
        case "Tuple":
            return ()
        case _:
            return None


def _name(like: object) -> str:
    return type_name(like)
