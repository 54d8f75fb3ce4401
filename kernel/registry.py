"""The one registry: values by name, of each kind that other distributions may add to.

A `PluginKind` says which values those are: stages, codecs, handlers, observers, stores. It finds penstock's
own and those of other distributions. A `StageRegistry` also has stages that were registered by hand, and
`penstock.handlers.leaves.handler_registry` has handlers by type.

A scheme of URLs, such as `s3`, is a value and one file, too: what is at `s3://bucket/run` is in a store that
is opened for `s3://bucket`. The name of its entry point in the group `penstock.stores` is the scheme.
"""

from __future__ import annotations

__all__ = (
    "SCHEMES",
    "SHORTEST_LEASE_S",
    "STAGES",
    "Plugin",
    "PluginKind",
    "Scheme",
    "StageRegistry",
    "find_plugins",
)

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, final

from penstock.kernel.errors import ConfigError, PenstockError, PipelineError
from penstock.kernel.words import nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
StageT = TypeVar("StageT")


@final
@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point that is found but not imported."""

    name: str  #: of the entry point
    distribution: str  #: that declares it, as `name version`
    load: Callable[[], Any]  #: blocking; imports the distribution's code and may raise anything

    def __str__(self) -> str:
        return f"entry point {self.name!r} of {self.distribution}"


def find_plugins(group: str) -> tuple[Plugin, ...]:
    """List the entry points of `group` on `sys.path`, in order of name; nothing is imported.

    Blocking: reads the metadata of every installed distribution, unless no distribution was added or removed
    since the last call.
    """
    changed: list[tuple[str, int]] = []  # every distribution has an entry in one of these folders
    for folder in sys.path:
        try:
            changed.append((folder, os.stat(folder or os.curdir).st_mtime_ns))
        except OSError:
            changed.append((folder, 0))

    return _find_plugins(group, tuple(changed))


@lru_cache(maxsize=8)
def _find_plugins(group: str, _: tuple[tuple[str, int], ...]) -> tuple[Plugin, ...]:
    from importlib.metadata import (
        entry_points,  # 30 ms, for which a command that finds no plug-in does not wait
    )

    found = [Plugin(point.name, _distribution(point), point.load) for point in entry_points(group=group)]
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.distribution)))


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


@final
@dataclass(frozen=True, slots=True)
class PluginKind(Generic[T]):
    """A kind of values that are found by name, in the entry points of one group. Immutable."""

    noun: str  #: for messages: `codec`
    group: str  #: of entry points: `penstock.codecs`
    error: Callable[[str], PenstockError]  #: makes the errors of this kind from a message
    check: Callable[[Any], T]  #: makes the value of what an entry point refers to; what it raises is reported
    remedy: str = "uninstall one of them"  #: where two distributions claim a name
    own: Mapping[str, str] = field(default_factory=dict[str, str])
    """penstock's own, by name, as an entry point has them: `module:name`. No distribution replaces them."""

    def names(self) -> tuple[str, ...]:
        """Return the names that there are, penstock's own first. Imports nothing. Blocking."""
        return (*self.own, *sorted({plugin.name for plugin in find_plugins(self.group)} - self.own.keys()))

    def find(self, name: str) -> T | None:
        """Return the value called `name`; None if there is none. Blocking: imports it.

        Raises:
            PenstockError: This kind's `error`, if two distributions claim the name, or the one that does is
                broken; the message names them.
        """
        if name in self.own:
            module, _, attribute = self.own[name].partition(":")
            return self.check(getattr(import_module(module), attribute))

        fitting = [plugin for plugin in find_plugins(self.group) if plugin.name == name]
        if len(fitting) > 1:
            both = f"{fitting[0].distribution} and {fitting[1].distribution}"
            raise self.error(f"the {self.noun} {name!r} is claimed by {both}; {self.remedy}")

        return self._load(fitting[0]) if fitting else None

    def load_all(self) -> Iterator[T]:
        """Yield the value of each entry point of other distributions. Blocking: imports it.

        Raises:
            PenstockError: This kind's `error`, if one is broken; the message names its distribution.
        """
        yield from map(self._load, find_plugins(self.group))

    def _load(self, plugin: Plugin) -> T:
        try:
            return self.check(plugin.load())
        except Exception as error:
            problem = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            raise self.error(f"{plugin} is broken: {problem}") from error


def _checked_factory(factory: object) -> Callable[..., Any]:
    if not callable(factory):
        raise PipelineError(f"{factory!r} cannot be called to make a stage")

    return factory


STAGES: Final = PluginKind(
    "stage", "penstock.stages", PipelineError, _checked_factory, "register one of them by hand"
)


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
            found = STAGES.find(name) if self._entry_points else None
            if found is None:
                raise PipelineError.unknown_stage(name, self.names())

            self._factories[name] = cast("Callable[..., StageT]", found)

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
        return tuple(sorted({*self._factories, *(STAGES.names() if self._entry_points else ())}))

    def copy(self) -> StageRegistry[StageT]:
        """Return an independent registry with the same stages."""
        return StageRegistry(self._factories, entry_points=self._entry_points)


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

    near = nearest(unknown[0], known)
    hint = f"did you mean {stage}.{near}?" if near else f"known here: {', '.join(known) or 'none'}"
    raise ConfigError(f"{stage}.{unknown[0]}", f"no such option; {hint}")


def _name(factory: Callable[..., object]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', type(factory).__qualname__)}"


SHORTEST_LEASE_S: Final = 60.0
"""No `ObjectStore` of another distribution's scheme has a shorter lease. Renewals are as frequent."""


@final
@dataclass(frozen=True, slots=True)
class Scheme:
    """Opens the stores of one scheme of URLs: what an entry point of `penstock.stores` refers to."""

    open: Callable[[str, Any], Any]  # a Store, by name only: protocols import this room
    """Returns the `Store` of a root, `scheme://name`, given the options of the scheme. Connects to nothing.

    The store gets whole URLs as paths. It is made once for each root and Checkpointer. The options of other
    distributions are the `Scheme` itself. Leases of an `ObjectStore` last `SHORTEST_LEASE_S` at least.
    """
    file_bytes: int = 16 * 2**20  #: of a data file, which the writer fills before it begins another
    concurrency: int = 8  #: so many threads write at once, and so many read


def _as_scheme(value: object) -> Scheme:
    if not isinstance(value, Scheme):
        raise ConfigError("store", f"{value!r} is no penstock.kernel.Scheme")

    return value


_BUCKET: Final = "penstock.handlers.stores.buckets.bucket_store:BUCKET"
_KEEPER: Final = "penstock.handlers.stores.keeper.keeper_store:KEEPER"

# Declared as other distributions declare theirs, so that the kernel imports no store.
SCHEMES: Final = PluginKind(
    "scheme",
    "penstock.stores",
    partial(ConfigError, "store"),
    _as_scheme,
    own={"s3": _BUCKET, "gs": _BUCKET, "az": _BUCKET, "keeper": _KEEPER},
)
"""The schemes that there are, by name."""
