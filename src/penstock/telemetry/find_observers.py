"""Observers by the names in the configuration."""

from __future__ import annotations

__all__ = ("OBSERVERS", "homes_of_observers", "observers_of")

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, cast

from penstock.config.config import TelemetryOptions
from penstock.event_loop.imports import Homes
from penstock.kernel.errors import ConfigError
from penstock.kernel.registry import PluginKind
from penstock.telemetry.observers import Observer

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


def homes_of_observers(options: TelemetryOptions) -> Homes:
    """Return the modules of the observers that come with penstock, as far as what they need is installed."""
    own = [name for name in options.observers if name in _NEEDS and find_spec(_NEEDS[name]) is not None]
    homes = [OBSERVERS.own[name].partition(":") for name in own]
    return {module: class_ for module, _, class_ in homes}


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
        raise ConfigError(_KEY, f"there is no observer {name!r}; {_hint(name, OBSERVERS.names())}")
    if not isinstance(made, Observer):
        raise ConfigError(_KEY, f"{name!r} makes a {type(made).__name__}, which is no Observer")

    return made


def _hint(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
