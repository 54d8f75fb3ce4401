"""Observers by the names in the configuration."""

from __future__ import annotations

__all__ = ("GROUP", "homes_of_observers", "observers_of")

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

from penstock.kernel.concurrency.imports import Homes
from penstock.kernel.config.telemetry_options import TelemetryOptions
from penstock.kernel.entry_points import Plugin, find_plugins
from penstock.kernel.errors import ConfigError
from penstock.kernel.pipeline.observers import Observer

GROUP: Final = "penstock.observers"
_KEY: Final = "telemetry.observers"
_HOMES: Final = {
    "prometheus": (
        "prometheus_client", "penstock.telemetry.prometheus_metrics", "PrometheusMetrics",
    ),
    "opentelemetry": (
        "opentelemetry", "penstock.telemetry.opentelemetry_spans", "OpenTelemetrySpans",
    ),
}  # fmt: skip


def observers_of(options: TelemetryOptions) -> tuple[Observer, ...]:
    """Make the observers that the configuration names. Blocking: imports them.

    Raises:
        ConfigError: If there is none of a name, or it cannot be made: the extra that it needs is missing.
    """
    return tuple([_made(name) for name in options.observers])


def homes_of_observers(options: TelemetryOptions) -> Homes:
    """Return the modules of the observers that come with penstock, as far as what they need is installed."""
    wanted = {name: _HOMES[name] for name in options.observers if name in _HOMES}
    return {home: class_ for package, home, class_ in wanted.values() if find_spec(package) is not None}


def _made(name: str) -> Observer:
    factories: dict[str, Callable[[], Any]] = {
        "prometheus": _prometheus,
        "opentelemetry": _opentelemetry,
    }
    for plugin in () if name in factories else find_plugins(GROUP):
        factories.setdefault(plugin.name, partial(_plugged_in, plugin))

    factory = factories.get(name)
    if factory is None:
        raise ConfigError(
            "telemetry.observers", f"there is no observer {name!r}; {_hint(name, list(factories))}"
        )
    try:
        made: object = factory()
    except Exception as error:
        extra = (
            f": pip install 'penstock[metrics]' ({error})"
            if isinstance(error, ImportError)
            else f": {error!r}"
        )
        raise ConfigError("telemetry.observers", f"the observer {name!r} cannot be made{extra}") from error

    if not isinstance(made, Observer):
        raise ConfigError(
            "telemetry.observers", f"{name!r} makes a {type(made).__name__}, which is no Observer"
        )

    return made


def _hint(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"


def _plugged_in(plugin: Plugin) -> Any:
    return plugin.load()()


def _prometheus() -> Observer:
    from penstock.telemetry.prometheus_metrics import PrometheusMetrics

    return PrometheusMetrics()


def _opentelemetry() -> Observer:
    from penstock.telemetry.opentelemetry_spans import OpenTelemetrySpans

    return OpenTelemetrySpans()
