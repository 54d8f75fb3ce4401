"""Checks which messages stages take and give. A pipeline that cannot work is refused before it runs."""

from __future__ import annotations

__all__ = ("check_messages",)

import inspect
import types
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import (
    Any,
    Final,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.restore import RestoredTree, RestoreRequest
from penstock.kernel.messages.save import SaveReport, TreeToSave
from penstock.kernel.pipeline.stage import DeclaresMessages

Kind: TypeAlias = Any
"""A message type: a class, or a generic such as `LeafBatch[Leaf]`. Any means unknown."""

ENDS: Final[Mapping[Kind, Kind]] = {TreeToSave: SaveReport, RestoreRequest: RestoredTree}
"""First message of a flow -> last message."""

_MANY: Final = (AsyncIterator, AsyncIterable, AsyncGenerator, Awaitable)


def messages_of(stage: object) -> list[tuple[Kind, Kind]]:
    """Return the types a stage takes, each with the type it gives, from its declaration or annotations."""
    if isinstance(stage, DeclaresMessages):
        return list(stage.messages.items())
    if not callable(stage):
        return [(Any, Any)]

    takes, gives = _annotated(stage)
    return [(taken, given) for taken in takes for given in gives]


def check_messages(stages: Sequence[tuple[str, object]], first: Kind = None) -> None:
    """Refuse a list in which a stage does not take what the one before it gives.

    Args:
        stages: Names and stages, in order.
        first: What the flow begins with; by default what the first stage takes.

    Raises:
        PipelineError: The message names the stage.
    """
    if not stages:
        raise PipelineError("a pipeline needs at least one stage")

    if first is None:
        takes = [taken for taken, _ in messages_of(stages[0][1])]
        first = next((end for end in ENDS if any(_fits(end, taken) for taken in takes)), None)
        if first is None:
            begins = " and a restore with ".join(map(_shown, ENDS))
            raise PipelineError(f"stage {stages[0][0]!r} takes {_listed(takes)}; a save begins with {begins}")

    kinds: list[Kind] = [first]
    before = "the call"
    for name, stage in stages:
        pairs = messages_of(stage)
        given = [gives for takes, gives in pairs if any(_fits(kind, takes) for kind in kinds)]
        if not given:
            taken = _listed([takes for takes, _ in pairs])
            raise PipelineError(f"stage {name!r} takes {taken}, but {before} gives {_listed(kinds)}")

        kinds, before = given, f"{name!r} before it"

    last = ENDS.get(first, Any)
    if not any(_fits(kind, last) for kind in kinds):
        problem = f"the last stage, {stages[-1][0]!r}, gives {_listed(kinds)}, not {_shown(last)}"
        raise PipelineError(f"the pipeline is not complete: {problem}")


def _annotated(function: Callable[..., Any]) -> tuple[list[Kind], list[Kind]]:
    """Return what a function takes and gives, by its annotations; Any where there are none."""
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    try:
        hints = get_type_hints(function)
        names = list(inspect.signature(function).parameters)
    except (NameError, TypeError, ValueError):  # annotations that exist for checkers only, or a function in C
        return [Any], [Any]

    if names and names[0] == "self" and not inspect.ismethod(function):
        names = names[1:]

    takes = list(_alternatives(hints.get(names[0], Any))) if names else [Any]
    return takes or [Any], list(_alternatives(hints.get("return", Any))) or [Any]


def _alternatives(hint: Any) -> Iterator[Kind]:
    """Yield the message types that an annotation allows, without None."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for arg in args:
            yield from _alternatives(arg)
    elif origin in _MANY and args:
        yield from _alternatives(args[0])
    elif origin is Coroutine and len(args) == 3:
        yield from _alternatives(args[2])
    elif hint is not types.NoneType:
        yield hint


def _fits(given: Kind, taken: Kind) -> bool:
    """True if a message of type `given` may be taken; unknown types fit."""
    if Any in (given, taken) or isinstance(given, TypeVar) or isinstance(taken, TypeVar):
        return True

    given_class, taken_class = _class_of(given), _class_of(taken)
    if not isinstance(given_class, type) or not isinstance(taken_class, type):
        return True
    if not issubclass(given_class, taken_class) and not issubclass(taken_class, given_class):
        return False

    return all(map(_fits, get_args(given), get_args(taken)))


def _class_of(kind: Kind) -> object:
    """Return the class of a generic type."""
    origin: object = get_origin(kind)
    return kind if origin is None else origin


def _listed(kinds: Iterable[Kind]) -> str:
    return " or ".join(sorted({_shown(kind) for kind in kinds}))


def _shown(kind: Kind) -> str:
    name = getattr(_class_of(kind), "__name__", str(kind))
    args = ", ".join(map(_shown, get_args(kind)))
    return f"{name}[{args}]" if args else name
