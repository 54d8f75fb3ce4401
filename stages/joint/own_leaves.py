"""Leaves that only one process has: how it announces them, and how the primary joins them to its own.

Of all other leaves every process has the same, in the same order; so they are counted alike everywhere. Those
of one process come after them in what it announces, in its own order.
"""

from __future__ import annotations

__all__ = (
    "Joined",
    "JoinedTrees",
    "announced_numbers",
    "encoded_own",
    "joined",
    "keys_of_node",
    "places_of_own",
)

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Final, cast, final

import numpy as np
import numpy.typing as npt

from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.messages.changed_specs import LeafChange
from penstock.kernel.messages.save import SavePlan
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafInfos, LeafSpec, ParamInfo, Replicas
from penstock.kernel.protocols.leaf_handlers import HandlerLookup, LeafHandler

_BYTES_OF_A_LEAF: Final = 100  # references, and what is said of a leaf that one process has
_FIELDS: Final = tuple([each.name for each in fields(LeafSpec) if each.init])
_SHAPES: Final = ("shape", "chunk_shape", "write_shape")


def places_of_own(infos: Sequence[ParamInfo]) -> Mapping[int, None]:
    """Return the places of leaves that this process alone has, in order."""
    if isinstance(infos, LeafInfos):  # as all trees are that have none
        return {}

    return {at: None for at, info in enumerate(infos) if info.own_from is not None}


def keys_of_node(info: ParamInfo) -> KeyPath:
    """Return the keys to the value that a leaf is in and that each process has for itself."""
    return info.keys[: info.own_from]


def announced_numbers(plan: SavePlan) -> npt.NDArray[np.int64]:
    """Return for each leaf the number under which this process announces it."""
    own = list(places_of_own(plan.infos))
    is_own = np.zeros(len(plan.infos), np.bool_)
    is_own[own] = True
    numbers = np.cumsum(~is_own) - 1
    numbers[own] = np.arange(len(own)) + len(plan.infos) - len(own)
    return numbers


def encoded_own(plan: SavePlan, specs: Sequence[LeafSpec]) -> list[Any]:
    """Return what msgpack can hold of the leaves that this process alone has.

    Args:
        plan: Of the save.
        specs: Of all leaves, as they were written.
    """
    return [
        {
            "keys": plan.infos[at].keys,
            "kinds": list(map(int, plan.infos[at].kinds)),
            "nodes": plan.infos[at].nodes,
            "key_path": plan.infos[at].key_path,
            "spec": _encoded(specs[at]),
            "stages": plan.changes[at].stages if at in plan.changes else (),
            "before": _encoded(plan.changes[at].before) if at in plan.changes else None,
        }
        for at in places_of_own(plan.infos)
    ]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The leaves of all processes together."""

    plan: SavePlan  #: the primary's, with those behind it that other processes have for themselves
    specs: Sequence[LeafSpec]
    places: Mapping[int, npt.NDArray[np.int64]]
    """Of each other process: the place of each number it tells. Without an entry the number is the place."""


def joined(
    plan: SavePlan,
    specs: Sequence[LeafSpec],
    own: Mapping[int, Sequence[Any]],
    registry: HandlerLookup,
) -> Joined:
    """Join the leaves of all processes, as the primary.

    Args:
        plan: The primary's.
        specs: Of its leaves, as they were written.
        own: By process, what `encoded_own` made.
        registry: Finds handlers by type name.

    Raises:
        ValueError, KeyError, TypeError: If it is something else.
        HandlerError: If there is no handler for a type of leaf that only another process has.
    """
    here = places_of_own(plan.infos)
    if not here and not any(own.values()):
        return Joined(plan, specs, {})

    common = np.array([at for at in range(len(plan.infos)) if at not in here], np.int64)
    if not any(own.values()):
        return Joined(plan, specs, dict.fromkeys(own, common))

    infos, all_specs = list(plan.infos), list(specs)
    handlers: list[LeafHandler] = list(plan.handlers)
    changes, places = dict(plan.changes), dict[int, npt.NDArray[np.int64]]()
    for process in sorted(own):
        first = len(infos)
        for row in own[process]:
            if row["stages"]:
                changes[len(infos)] = LeafChange(tuple(row["stages"]), _decoded(row["before"]))

            infos.append(_info(row))
            all_specs.append(_decoded(row["spec"]))
            handlers.append(registry.for_typestr(all_specs[-1].typestr, infos[-1].key_path))

        places[process] = np.concatenate([common, np.arange(first, len(infos))])

    whole = replace(plan, infos=infos, specs=all_specs, handlers=handlers, changes=changes)
    return Joined(whole, all_specs, places)


@final
class JoinedTrees:
    """Caches the joined leaves of the last few trees. Thread-safe.

    Documents are recognised by the very lists that they were made of, and making them anew takes long.

    Args:
        kept: The cache, of `RunCaches`.
    """

    __slots__ = ("_known",)

    def __init__(self, kept: BoundedCache[ByIdentity, tuple[Mapping[int, Sequence[Any]], Joined]]) -> None:
        self._known = kept

    def of(
        self,
        plan: SavePlan,
        specs: Sequence[LeafSpec],
        own: Mapping[int, Sequence[Any]],
        registry: HandlerLookup,
    ) -> Joined:
        """Do what `joined` does, with the lists of an earlier save if nothing differs."""
        known = self._known.get(ByIdentity(specs))
        if known is not None and known[0] == own:
            before = known[1]
            lists = {name: getattr(before.plan, name) for name in ("infos", "specs", "handlers", "changes")}
            return replace(before, plan=replace(plan, **lists))

        found = joined(plan, specs, own, registry)
        if found.plan is not plan:
            self._known.put(ByIdentity(specs), (own, found), _BYTES_OF_A_LEAF * len(found.specs))

        return found


def _info(row: Mapping[str, Any]) -> ParamInfo:
    return ParamInfo(
        tuple(row["keys"]),
        tuple(map(KeyKind, row["kinds"])),
        row["key_path"],
        nodes=tuple(row["nodes"]),
    )


def _encoded(spec: LeafSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in _FIELDS} | {"replicas": astuple(spec.replicas)}


def _decoded(found: Mapping[str, Any]) -> LeafSpec:
    values = dict(found)
    for name in _SHAPES:
        shape = cast("Sequence[int] | None", values[name])
        values[name] = None if shape is None else tuple(shape)

    values["replicas"] = Replicas(*values["replicas"])
    return LeafSpec(**values)
