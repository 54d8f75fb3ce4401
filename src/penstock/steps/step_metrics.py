"""The metrics of a step: numbers by name, and whether they have what a policy ranks by."""

from __future__ import annotations

__all__ = ("RankedMetrics", "as_json_metrics", "as_metrics", "best_step", "missing_metrics")

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, SupportsFloat, cast, final

from structlog.stdlib import BoundLogger

from penstock.kernel.errors import SpecError, UnknownMetricError
from penstock.steps.keep_policies import (
    KeepPolicy,
    Metric,
    Mode,
    StepInfo,
    best_of,
    has_metric,
    ranked_names,
)

_MISSPELT: Final = 0.8
"""From this likeness on, one of two names is likely a slip. `train_loss` and `eval_loss` are less alike."""


def as_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON numbers, nested as they were. May wait for a device.

    A number is whatever Python's `float` takes and is no text: an int, NaN, a scalar of NumPy or jax, an
    array of one number.

    Raises:
        SpecError: If one is not a number; it is named.
    """
    found = as_json_metrics(metrics)
    for name, value in _each(found):
        if value is None or isinstance(value, (str, list)):
            problem = f"the metric {name!r} is {value!r}, not a number"
            raise SpecError(f"{problem}; leave it out, or put it into custom_metadata")
        try:
            float(value)
        except OverflowError as error:
            raise SpecError(f"the metric {name!r} is an integer too large for a float") from error

    return found


def as_json_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON values; arrays of one number become that number. May wait for a device.

    Raises:
        SpecError: If one is not a number, a text, or a list or mapping of those.
    """
    if not isinstance(cast("object", metrics), Mapping):
        raise SpecError(f"metrics must be a mapping, not {metrics!r}")

    return {str(name): _as_json(str(name), value) for name, value in metrics.items()}


@final
class RankedMetrics:
    """Converts metrics to numbers, and checks that the metric that a policy ranks by exists.

    Args:
        policy: What stays.
        steps: Returns all that there are, with their metrics. Blocking.
        events: Where it is said, once, that a metric is missing.
    """

    __slots__ = ("_events", "_policy", "_said", "_seen", "_steps")

    def __init__(
        self, policy: KeepPolicy, steps: Callable[[], Sequence[StepInfo]], events: BoundLogger
    ) -> None:
        self._policy = policy
        self._steps = steps
        self._events = events
        self._seen = not ranked_names(policy)  # whether a step has each metric: none is misspelt
        self._said = False

    def checked(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of the step to be saved as `as_metrics` does.

        Raises:
            SpecError, UnknownMetricError: As `as_metrics` and `missing_metrics`.
        """
        numbers = as_metrics(metrics)
        if not numbers or self._seen:
            return numbers

        missing = missing_metrics(self._policy, numbers, self._steps())
        self._seen = not missing
        if missing and not self._said:
            self._said = True
            self._events.warning("step.metric_missing", metrics=missing, known=list(numbers))

        return numbers


def missing_metrics(
    policy: KeepPolicy, metrics: Mapping[str, Any], steps: Sequence[StepInfo]
) -> Sequence[str]:
    """Name the metrics that a policy ranks by, and that neither a step has nor the one to be saved.

    For lack of one the policy keeps every step. It may come later, as that of an evaluation does. But if
    there is one of nearly the same name, one of the two is misspelt, and the step is refused.

    Args:
        policy: What stays.
        metrics: Those of the step to be saved.
        steps: Those that there are, with their metrics.

    Raises:
        UnknownMetricError: If one is misspelt.
    """
    infos = (StepInfo(0, metrics=metrics), *steps)
    missing = [name for name in ranked_names(policy) if not any(has_metric(info, name) for info in infos)]
    known = [name for name, _ in _each(metrics)]
    for name in missing:
        if _is_misspelt(name, known):
            raise UnknownMetricError(name, known, at_save=True)

    return missing


def best_step(steps: Sequence[StepInfo], metric: Metric, mode: Mode) -> int | None:
    """Return the step with the best metric, the later of two that are equal; None if none is finite.

    Raises:
        UnknownMetricError: If no step has a metric of this name, and there is one of nearly the same.
    """
    if isinstance(metric, str) and not any(has_metric(info, metric) for info in steps):
        known = sorted({name for info in steps for name, _ in _each(info.metrics or {})})
        if _is_misspelt(metric, known):
            raise UnknownMetricError(metric, known)

    return best_of(steps, metric, mode)


def _is_misspelt(name: str, known: Iterable[str]) -> bool:
    folded = [each.casefold() for each in known]
    return bool(get_close_matches(name.casefold(), folded, n=1, cutoff=_MISSPELT))


def _each(metrics: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    """Yield each metric with its name; those of nested ones are joined by slashes."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _each(cast("Mapping[str, Any]", value), f"{before}{name}/")
        else:
            yield f"{before}{name}", value


def _as_json(name: str, value: object) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        inner = cast("Mapping[object, object]", value)
        return {str(key): _as_json(f"{name}/{key}", part) for key, part in inner.items()}
    if isinstance(value, (list, tuple)):
        parts = cast("list[object]", value)
        return [_as_json(f"{name}/{at}", part) for at, part in enumerate(parts)]
    if isinstance(value, (str, bytes, bytearray)):  # of which `float` would make a number, if it can
        raise SpecError(f"the metric {name!r} is a {type(value).__name__}, not a number")

    try:
        return float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"the metric {name!r} is a {type(value).__name__}, not a number") from error
