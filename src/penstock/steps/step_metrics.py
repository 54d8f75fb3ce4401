"""The metrics of a step: numbers by name, and whether they have what a policy ranks by. Pure."""

from __future__ import annotations

__all__ = ("as_json_metrics", "as_metrics", "check_ranked", "is_ranked")

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat, cast

from penstock.kernel.errors import SpecError, UnknownMetricError
from penstock.steps.keep_policies import KeepPolicy, StepInfo, has_metric, ranked_names


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


def is_ranked(policy: KeepPolicy) -> bool:
    """Whether a policy ranks steps by a metric that it names."""
    return bool(ranked_names(policy))


def check_ranked(policy: KeepPolicy, metrics: Mapping[str, Any], steps: Sequence[StepInfo]) -> None:
    """Refuse metrics that lack one which a policy ranks by and no step has: its name is misspelt somewhere.

    The policy would keep every step for lack of it.

    Args:
        policy: What stays.
        metrics: Those of the step to be saved.
        steps: Those that there are, with their metrics.

    Raises:
        UnknownMetricError: If so.
    """
    for name in ranked_names(policy):
        if not any(has_metric(info, name) for info in (StepInfo(0, metrics=metrics), *steps)):
            raise UnknownMetricError(name, [known for known, _ in _each(metrics)])


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
