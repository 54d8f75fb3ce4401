"""A pipeline as a value: named stages in order, changed by making another one."""

from __future__ import annotations

__all__ = (
    "Pipeline",
    "Slot",
)

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeGuard, TypeVar, final

from penstock.kernel.config.option_layers import load_options
from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.changed_specs import CodecChoice
from penstock.kernel.pipeline.message_types import check_messages
from penstock.kernel.pipeline.stage import ChangesLeaves, FunctionStage, Stage, workers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.kernel.messages.changed_specs import SpecChange
    from penstock.kernel.pipeline.futures import Milestone

RunT = TypeVar("RunT")
StageFunction: TypeAlias = Callable[[Any], Any]
"""From one message to the next. A plain function is called in a worker thread."""


@final
@dataclass(frozen=True, slots=True)
class Slot(Generic[RunT]):
    """A named place in a pipeline, with its stage. A function or callable becomes a `FunctionStage`.

    The milestone belongs to the place and not to the stage, so a replaced `device_to_host` still
    says when a save is staged.
    """

    name: str
    stage: Stage[RunT]
    milestone: Milestone | None = None  #: reached when this stage has passed on its last message
    queue: int = 0  #: messages its outlet holds; above 0 only where something else bounds their bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", _as_stage(self.stage))
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

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for slot in self.slots:
            if slot.name in seen:
                raise PipelineError(f"two stages are called {slot.name!r}")

            seen.add(slot.name)

    def __iter__(self) -> Iterator[Slot[RunT]]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, name: str) -> Stage[RunT]:
        return self.slots[self._place(name)].stage

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages, in order."""
        return tuple(slot.name for slot in self.slots)

    @property
    def spec_changes(self) -> tuple[tuple[str, SpecChange], ...]:
        """The changes to leaves that stages declare, in order, by stage name."""
        stages = [(slot.name, _declared(slot)) for slot in self.slots]
        return tuple([(name, each.resolve_spec) for name, each in stages if isinstance(each, ChangesLeaves)])

    @property
    def codec_choice(self) -> CodecChoice | None:
        """The first stage that decides about the codec `auto`, if there is one."""
        return next((stage for slot in self.slots if isinstance(stage := _declared(slot), CodecChoice)), None)

    def check(self, first: type | None = None) -> None:
        """Refuse a pipeline that cannot work: a stage that does not take what the one before it gives.

        Done whenever a Checkpointer or a call takes a pipeline. A stage that neither declares its `messages`
        nor annotates its function fits anywhere.

        Args:
            first: The type of the first message; by default what the first stage takes.

        Raises:
            PipelineError: The message names the stage.
        """
        check_messages([(slot.name, _declared(slot)) for slot in self.slots], first)

    def replace(self, name: str, stage: Stage[RunT] | StageFunction) -> Pipeline[RunT]:
        """Put `stage` in the place of the one called `name`."""
        at = self._place(name)
        slot = replace(self.slots[at], stage=_as_stage(stage))
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


def _declared(slot: Slot[Any]) -> object:
    """Return the object that carries a stage's declarations: for a `FunctionStage`, its function."""
    return slot.stage.function if isinstance(slot.stage, FunctionStage) else slot.stage


def _as_stage(stage: Any) -> Stage[Any]:
    if isinstance(stage, type):
        raise PipelineError(f"{stage.__name__} is a class; a pipeline holds an instance of it")
    if _is_stage(stage):
        return stage
    if callable(stage):
        return FunctionStage(stage, workers_of(stage))

    raise PipelineError(f"{stage!r} is neither a stage nor a function")


def _is_stage(stage: object) -> TypeGuard[Stage[Any]]:
    return isinstance(stage, Stage)


def _name_of(stage: Stage[Any]) -> str:
    named: object = stage.function if isinstance(stage, FunctionStage) else type(stage)
    name: str = getattr(named, "__name__", type(named).__name__)
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).strip("_")


def _with_options(slot: Slot[RunT], given: Mapping[str, Any], source: str) -> Stage[RunT]:
    declared = _declared(slot)
    stage = declared if dataclasses.is_dataclass(declared) else slot.stage
    if not dataclasses.is_dataclass(stage) or isinstance(stage, type):
        raise PipelineError(f"the stage {slot.name!r} is not a dataclass, so it has no options to set")

    return _as_stage(load_options(stage, section=slot.name, arguments=given, source=source))
