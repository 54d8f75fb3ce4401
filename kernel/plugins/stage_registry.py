"""Stages by name: built-in ones and those of other distributions."""

from __future__ import annotations

__all__ = ("StageRegistry",)

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Generic, TypeVar, cast, final

from penstock.kernel.entry_points import Plugin, find_plugins
from penstock.kernel.errors import ConfigError, PipelineError

StageT = TypeVar("StageT")

GROUP = "penstock.stages"


@final
class StageRegistry(Generic[StageT]):
    """Stage factories by name: callables that take options by keyword and return a stage.

    The class of a stage that is a dataclass is such a factory. Other distributions add stages
    through the entry-point group `penstock.stages`; the name of the entry point is the name of the
    stage. One is imported only when it is looked up, and none replaces a stage registered by hand.

    Args:
        factories: Stages to begin with.
        entry_points: Whether to consult the entry points at all.
    """

    __slots__ = ("_entry_points", "_factories")

    def __init__(
        self, factories: Mapping[str, Callable[..., StageT]] | None = None, *, entry_points: bool = True
    ) -> None:
        self._factories: dict[str, Callable[..., StageT]] = dict(factories or {})
        self._entry_points = entry_points

    def register(self, name: str, factory: Callable[..., StageT], *, override: bool = False) -> None:
        """Let `name` mean `factory`.

        Raises:
            PipelineError: If the name is taken and `override` is not set; the message names both.
        """
        before = self._factories.get(name)
        if before is not None and not override:
            raise PipelineError(
                f"the stage {name!r} is {_name(before)} already; "
                f"pass override=True to let {_name(factory)} replace it"
            )

        self._factories[name] = factory

    def factory(self, name: str) -> Callable[..., StageT]:
        """Return the factory of the stage called `name`.

        Raises:
            PipelineError: If there is none, if two distributions claim the name, or if the entry
                point is broken; the message names the distributions.

        Blocking: A name that was not registered by hand is looked for among the entry points, once.
        """
        if name not in self._factories:
            self._factories[name] = cast("Callable[..., StageT]", _load(self._plugin(name)))

        return self._factories[name]

    def create(self, name: str, **options: Any) -> StageT:
        """Make the stage called `name`.

        Raises:
            PipelineError: As `factory` does.
            ConfigError: If the stage has no such option; the message names the nearest.
        """
        factory = self.factory(name)
        _check_options(name, factory, options)
        return factory(**options)

    def names(self) -> tuple[str, ...]:
        """All known stage names, including those of entry points; sorted. Imports nothing."""
        return tuple(sorted({*self._factories, *(plugin.name for plugin in self._plugins())}))

    def copy(self) -> StageRegistry[StageT]:
        """Return an independent registry with the same stages."""
        return StageRegistry(self._factories, entry_points=self._entry_points)

    def _plugins(self) -> tuple[Plugin, ...]:
        return find_plugins(GROUP) if self._entry_points else ()

    def _plugin(self, name: str) -> Plugin:
        fitting = [plugin for plugin in self._plugins() if plugin.name == name]
        if len(fitting) > 1:
            both = f"{fitting[0].distribution} and {fitting[1].distribution}"
            raise PipelineError(f"the stage {name!r} is claimed by {both}; register one of them by hand")
        if not fitting:
            raise PipelineError.unknown_stage(name, self.names())

        return fitting[0]


def _check_options(stage: str, factory: Callable[..., object], options: Mapping[str, object]) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # written in C, and without a signature
        return

    kinds = {parameter.kind for parameter in parameters}
    known = [one.name for one in parameters if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}]
    unknown = [name for name in options if name not in known]
    if not unknown or inspect.Parameter.VAR_KEYWORD in kinds:
        return

    near = get_close_matches(unknown[0], known, n=1)
    hint = f"did you mean {stage}.{near[0]}?" if near else f"known here: {', '.join(known) or 'none'}"
    raise ConfigError(f"{stage}.{unknown[0]}", f"no such option; {hint}")


def _load(plugin: Plugin) -> object:
    try:
        factory = plugin.load()
    except Exception as error:
        raise PipelineError(f"{plugin} is broken: {type(error).__name__}: {error}") from error

    if not callable(factory):
        raise PipelineError(f"{plugin} is broken: {factory!r} cannot be called to make a stage")

    return factory


def _name(factory: Callable[..., object]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', type(factory).__qualname__)}"
