"""Observers of every save and restore, for metrics and traces."""

from __future__ import annotations

__all__ = (
    "Observer",
    "PromotionObserver",
    "TellReport",
    "modules_of_observers",
    "observed",
    "observers_of",
    "tell_promotion",
    "watched",
)

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast, final, runtime_checkable

from penstock.config.config import TelemetryOptions
from penstock.event_loop.imports import NeededModules
from penstock.kernel.errors import ConfigError
from penstock.kernel.protocols.capability import Capability
from penstock.kernel.registry import PluginKind
from penstock.kernel.words import hint_at

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from penstock.kernel.memory.regulator import RegulatorStatistics
    from penstock.reports.report import Promotion, StageReport


TellReport: TypeAlias = "Callable[[StageReport], object]"


@runtime_checkable
class Observer(Capability, Protocol):
    """Hears of every save and restore of a Checkpointer, in the event loop: it must not block.

    Its own errors are logged as `telemetry.failed`, and disturb nothing.
    """

    def observing(self, kind: str, path: str) -> AbstractContextManager[TellReport]:
        """Return a context for one save or restore.

        An exception that leaves it is how the operation failed, or its cancellation. What it yields is called
        with the report of one that succeeded. The stages run inside it, so a context variable that is set
        here is seen by them, and by the store.

        Args:
            kind: `save` or `restore`.
            path: Of the checkpoint.
        """
        ...

    def watching(self, statistics: Callable[[], RegulatorStatistics]) -> AbstractContextManager[object]:
        """Return a context for the time that a Checkpointer is open.

        Args:
            statistics: Tells the state of its memory budget, from any thread.
        """
        ...


@runtime_checkable
class PromotionObserver(Capability, Protocol):
    """An `Observer` that hears of promotions, too."""

    def promoted(self, promotion: Promotion, /) -> object:
        """Hear of one, in the event loop: it must not block."""
        ...


def tell_promotion(observers: Sequence[Observer], promotion: Promotion, events: BoundLogger) -> None:
    """Tell a promotion to all observers that hear of them. What they raise is logged."""
    for observer in observers:
        if isinstance(observer, PromotionObserver):
            try:
                observer.promoted(promotion)
            except Exception as error:
                events.warning("telemetry.failed", error=repr(error))


@contextmanager
def observed(
    observers: Sequence[Observer], kind: str, path: str, events: BoundLogger
) -> Generator[Sequence[TellReport]]:
    """Have all observers observe one save or restore. Yield what to call with its report."""
    with ExitStack() as stack:
        entered: list[TellReport] = []
        for observer in observers:
            tell = stack.enter_context(_Guarded(partial(observer.observing, kind, path), events))
            if tell is not None:
                entered.append(tell)

        yield entered


@contextmanager
def watched(
    observers: Sequence[Observer], statistics: Callable[[], RegulatorStatistics], events: BoundLogger
) -> Generator[None]:
    """Let all observers watch the memory budget."""
    with ExitStack() as stack:
        for observer in observers:
            stack.enter_context(_Guarded(partial(observer.watching, statistics), events))

        yield


@final
class _Guarded:
    """A context of an observer, whose own errors are logged and not raised."""

    __slots__ = ("_context", "_events", "_make", "_tell")

    def __init__(self, make: Callable[[], AbstractContextManager[object]], events: BoundLogger) -> None:
        self._make = make
        self._events = events
        self._context: AbstractContextManager[object] | None = None
        self._tell: TellReport | None = None

    def __enter__(self) -> TellReport | None:
        try:
            context = self._make()
            entered: object = context.__enter__()
        except Exception as error:
            self._events.warning("telemetry.failed", error=repr(error))
            return None

        self._context = context
        if not callable(entered):
            return None

        self._tell = entered
        return self._report

    def _report(self, report: StageReport) -> None:
        assert self._tell is not None, "it was entered"
        try:
            self._tell(report)
        except Exception as error:
            self._events.warning("telemetry.failed", error=repr(error))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._context is None:
            return
        try:
            self._context.__exit__(kind, value, traceback)
        except Exception as error:
            if error is not value:
                self._events.warning("telemetry.failed", error=repr(error))


_KEY: Final = "telemetry.observers"


def _as_factory(value: object) -> Callable[[], Any]:
    return cast("Callable[[], Any]", value)


OBSERVERS: Final = PluginKind(
    "observer",
    "penstock.observers",
    partial(ConfigError, _KEY),
    _as_factory,
    own={
        "opentelemetry": "penstock.telemetry.opentelemetry_spans:OpenTelemetrySpans",
        "prometheus": "penstock.telemetry.prometheus_metrics:PrometheusMetrics",
    },
)
_NEEDS: Final = {"opentelemetry": "opentelemetry", "prometheus": "prometheus_client"}  # of an extra each


def observers_of(options: TelemetryOptions) -> tuple[Observer, ...]:
    """Make the observers that the configuration names. Blocking: imports them.

    Raises:
        ConfigError: If there is none of a name, or it cannot be made: the extra that it needs is missing.
    """
    return tuple([_made(name) for name in options.observers])


def modules_of_observers(options: TelemetryOptions) -> NeededModules:
    """Return the modules of the observers that come with penstock, as far as what they need is installed."""
    own = [name for name in options.observers if name in _NEEDS and find_spec(_NEEDS[name]) is not None]
    places = [OBSERVERS.own[name].partition(":") for name in own]
    return {module: class_ for module, _, class_ in places}


def _made(name: str) -> Observer:
    try:
        factory = OBSERVERS.find(name)
        made: object = None if factory is None else factory()
    except ConfigError:
        raise
    except Exception as error:
        extra = (
            f": pip install 'penstock[metrics]' ({error})"
            if isinstance(error, ImportError)
            else f": {error!r}"
        )
        raise ConfigError(_KEY, f"the observer {name!r} cannot be made{extra}") from error

    if factory is None:
        raise ConfigError(_KEY, f"there is no observer {name!r}; {hint_at(name, OBSERVERS.names())}")
    if not isinstance(made, Observer):
        raise ConfigError(_KEY, f"{name!r} makes a {type(made).__name__}, which is no Observer")

    return made
