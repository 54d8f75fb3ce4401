"""A pipeline as a value: named stages in order, changed by making another one.

The messages that its stages take and give are checked: one that cannot work is refused before it runs.
"""

from __future__ import annotations

__all__ = (
    "Milestone",
    "Pipeline",
    "Slot",
    "check_messages",
)

import dataclasses
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
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    final,
    get_args,
    get_origin,
    get_type_hints,
)

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.changed_specs import CodecChoice
from penstock.kernel.messages.restore import RestoredTree, RestoreRequest
from penstock.kernel.messages.save import Published, TreeToSave
from penstock.kernel.options import load_options
from penstock.kernel.pipeline.stage import (
    ChangesLeaves,
    DeclaresMessages,
    FunctionStage,
    PassesOn,
    Stage,
    workers_of,
)
from penstock.kernel.pipeline.statistics import Advice, advice_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.kernel.messages.changed_specs import SpecChange

RunT = TypeVar("RunT")
StageFunction: TypeAlias = Callable[[Any], Any]
"""From one message to the next. A plain function is called in a worker thread."""


class Milestone(IntEnum):
    """The points a save passes, in order."""

    PLANNED = 1  #: every leaf is checked and can be stored; nothing is written yet
    STAGED = 2  #: the state may be mutated, deleted or donated
    WRITTEN = 3  #: array bytes are durable
    COMMITTED = 4  #: index and metadata are durable, under a temporary name
    KEPT = 5  #: whole and durable in the nearest tier; without tiers, the same as FINALIZED
    FINALIZED = 6  #: durable and visible under its own name

    def __str__(self) -> str:
        return self.name.lower()


@final
@dataclass(frozen=True, slots=True)
class Slot(Generic[RunT]):
    """A named place in a pipeline, with its stage. A function or callable becomes a `FunctionStage`.

    The milestone belongs to the place and not to the stage, so a replaced `device_to_host` still
    says when a save is staged. A stage is a value, so it is asked here, once, and not by each run.
    """

    name: str
    stage: Stage[RunT]
    milestone: Milestone | None = None  #: reached when this stage has passed on its last message
    queue: int = 0  #: messages its outlet holds; above 0 only where something else bounds their bytes
    declared: object = field(init=False, repr=False, compare=False)
    """What carries the declarations of the stage: of a `FunctionStage`, its function."""
    workers: int = field(init=False, repr=False, compare=False)
    is_needed: bool = field(init=False, repr=False, compare=False)  #: False: runs may leave the stage out
    advice: Advice = field(init=False, repr=False, compare=False)  #: if it is the bottleneck

    def __post_init__(self) -> None:
        stage = _as_stage(self.stage)
        declared: object = stage.function if isinstance(stage, FunctionStage) else stage
        passes_on = isinstance(stage, PassesOn) and stage.passes_on
        put = partial(object.__setattr__, self)  # this is its construction
        put("stage", stage)
        put("declared", declared)
        put("workers", workers_of(stage))
        put("is_needed", self.milestone is not None or not passes_on)
        put("advice", advice_of(declared))
        if self.queue < 0:
            raise PipelineError(f"the queue of stage {self.name!r} cannot hold {self.queue} messages")


@final
@dataclass(frozen=True, slots=True)
class Pipeline(Generic[RunT]):
    """Stages in order. Every method returns a new pipeline and leaves this one as it is.

    A stage may also be a plain function from message to message, or a callable object. Intermediate
    pipelines may be incomplete: only `check` looks at whether the stages fit together.

    Raises:
        PipelineError: If two stages share a name, or a named stage is not there.
    """

    slots: tuple[Slot[RunT], ...]
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)  #: of the stages, in order
    spec_changes: tuple[tuple[str, SpecChange], ...] = field(init=False, repr=False, compare=False)
    """The changes to leaves that stages declare, in order, by stage name."""
    codec_choice: CodecChoice | None = field(init=False, repr=False, compare=False)
    """The first stage that decides about the codec `auto`, if there is one."""

    def __post_init__(self) -> None:
        changes: dict[str, SpecChange] = {}
        choice: CodecChoice | None = None
        names: list[str] = []
        given = cast("object", self.slots)
        are_slots = isinstance(given, Sequence) and all(
            isinstance(each, Slot) for each in cast("Sequence[object]", given)
        )
        if not are_slots:
            raise PipelineError(f"slots are a tuple of `Slot`, not {given!r}")

        for slot in self.slots:
            if slot.name in names:
                raise PipelineError(f"two stages are called {slot.name!r}")

            names.append(slot.name)
            if isinstance(slot.declared, ChangesLeaves):
                changes[slot.name] = slot.declared.resolve_spec
            if choice is None and isinstance(slot.declared, CodecChoice):
                choice = slot.declared

        put = partial(object.__setattr__, self)  # this is its construction
        put("names", tuple(names))
        put("spec_changes", tuple(changes.items()))
        put("codec_choice", choice)

    def __iter__(self) -> Iterator[Slot[RunT]]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, name: str) -> Stage[RunT]:
        return self.slots[self._place(name)].stage

    def check(self, first: type | None = None) -> None:
        """Refuse a pipeline with a stage that does not take the messages of the one before it.

        Done whenever a Checkpointer or a call takes a pipeline. A stage that neither declares its `messages`
        nor annotates its function fits anywhere.

        Args:
            first: The type of the first message; by default what the first stage takes.

        Raises:
            PipelineError: The message names the stage.
        """
        check_messages([(slot.name, slot.declared) for slot in self.slots], first)

    def replace(self, name: str, stage: Stage[RunT] | StageFunction) -> Pipeline[RunT]:
        """Put `stage` in the place of the one called `name`."""
        at = self._place(name)
        slot = replace(self.slots[at], stage=cast("Stage[RunT]", stage))
        return Pipeline((*self.slots[:at], slot, *self.slots[at + 1 :]))

    def insert_before(
        self, name: str, stage: Stage[RunT] | StageFunction, *, called: str = ""
    ) -> Pipeline[RunT]:
        """Put `stage` before the one called `name`, under the name `called` or one made from its type."""
        return self._insert(self._place(name), stage, called)

    def insert_after(
        self, name: str, stage: Stage[RunT] | StageFunction, *, called: str = ""
    ) -> Pipeline[RunT]:
        """Put `stage` after the one called `name`, under the name `called` or one made from its type."""
        return self._insert(self._place(name) + 1, stage, called)

    def without(self, name: str) -> Pipeline[RunT]:
        """Leave out the stage called `name`; its milestone passes to the stage before it.

        It replaces that stage's own milestone, which the later one implies.
        """
        at = self._place(name)
        before, gone, after = self.slots[:at], self.slots[at], self.slots[at + 1 :]
        if before and gone.milestone is not None:
            before = (*before[:-1], replace(before[-1], milestone=gone.milestone))

        return Pipeline((*before, *after))

    def configure(self, name: str, **options: Any) -> Pipeline[RunT]:
        """Change options of the stage called `name`, checked like those of a config file.

        Raises:
            ConfigError: If the stage has no such option, or the value does not fit.
        """
        return self.configured({name: options})

    def configured(
        self, options: Mapping[str, Mapping[str, Any]], *, source: str = "argument"
    ) -> Pipeline[RunT]:
        """Change options of several stages: stage name -> option -> value."""
        slots = list(self.slots)
        for name, given in options.items():
            at = self._place(name)
            slots[at] = replace(slots[at], stage=_with_options(slots[at], given, source))

        return Pipeline(tuple(slots))

    def _insert(self, at: int, stage: Stage[RunT] | StageFunction, called: str) -> Pipeline[RunT]:
        made = _as_stage(stage)
        slot = Slot(called or _name_of(made), made)
        return Pipeline((*self.slots[:at], slot, *self.slots[at:]))

    def _place(self, name: str) -> int:
        for at, slot in enumerate(self.slots):
            if slot.name == name:
                return at

        raise PipelineError.unknown_stage(name, self.names)


def _as_stage(given: Any) -> Stage[Any]:
    if isinstance(given, type):
        raise PipelineError(f"{given.__name__} is a class; a pipeline holds an instance of it")
    if isinstance(cast("object", given), Stage):
        stage: Stage[Any] = given
        return stage
    if callable(given):
        return FunctionStage(given, workers_of(given))

    raise PipelineError(f"{given!r} is neither a stage nor a function")


def _name_of(stage: Stage[Any]) -> str:
    named: object = stage.function if isinstance(stage, FunctionStage) else type(stage)
    name: str = getattr(named, "__name__", type(named).__name__)
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).strip("_")


def _with_options(slot: Slot[RunT], given: Mapping[str, Any], source: str) -> Stage[RunT]:
    stage = slot.declared if dataclasses.is_dataclass(slot.declared) else slot.stage
    if not dataclasses.is_dataclass(stage) or isinstance(stage, type):
        raise PipelineError(f"the stage {slot.name!r} is not a dataclass, so it has no options to set")

    return _as_stage(load_options(stage, section=slot.name, arguments=given, source=source))


Kind: TypeAlias = Any
"""A message type: a class, perhaps a generic one. Any means unknown."""

ENDS: Final[Mapping[Kind, Kind]] = {TreeToSave: Published, RestoreRequest: RestoredTree}
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
    """Refuse a list in which a stage does not take the messages of the one before it.

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
    """Return the message types of a function, by its annotations; Any where there are none."""
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
