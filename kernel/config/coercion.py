"""Conversion of a value from a file, the environment or a call to the type of an option."""

from __future__ import annotations

__all__ = ("fit",)

import math
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, final, get_args, get_origin

from penstock.kernel.config.units import parse_bytes, parse_seconds

T = TypeVar("T")

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_IN_BYTES = ("_bytes", "_byte_size", "_file_size")  # the last two are Orbax's names


@final
class _Refused(Exception):
    """The value has the wrong type; the message names the right one."""


def fit(value: object, hint: Any, name: str, *, textual: bool = False, positive: bool = False) -> object:
    """Convert `value` to the type `hint` of the option `name`.

    The suffix of the name is its unit: `_bytes` takes a number or a text such as `"64MiB"`, `_s` a
    number or a text such as `"500ms"`. Neither may be negative, and no number may be NaN or infinite.

    Args:
        value: As the user gave it.
        hint: An evaluated annotation.
        name: Of the field.
        textual: Whether `value` is text only because its source (the environment) holds nothing else.
        positive: Refuse zero and less.

    Raises:
        ValueError: If it does not fit; the message says what would.
    """
    wanted: list[str] = []
    problem: ValueError | None = None
    for option in get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,):
        try:
            return _checked(_fit_one(value, option, name, textual), name, positive)
        except _Refused as refused:
            wanted.append(str(refused))
        except ValueError as error:
            problem = error  # nearly right, so its message says more than a list of types

    raise problem or ValueError(f"must be {' or '.join(wanted)}, not {value!r}")


def _checked(value: object, name: str, positive: bool) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not math.isfinite(value):
        raise ValueError(f"must be finite, not {value}")
    if positive and value <= 0:
        raise ValueError(f"must be positive, not {value}")
    if value < 0 and name.endswith((*_IN_BYTES, "_s")):
        raise ValueError(f"must not be negative: {value}")

    return value


def _fit_one(value: object, hint: Any, name: str, textual: bool) -> object:
    if hint in {int, float}:
        return _number(value, hint, name, textual)
    if hint is bool and textual:
        return _truth(str(value))
    if hint is NoneType:
        return _of_class(value, NoneType, "None")

    origin = get_origin(hint) or hint
    if origin is Literal:
        return _one_of(value, get_args(hint), textual)
    if origin in {tuple, list, Sequence}:
        return _sequence(value, hint, name, textual)
    if origin is Callable:
        return _kept(callable(value), value, "a function")
    if isinstance(origin, type):
        return _of_class(value, origin, {str: "a text", bool: "true or false"}.get(origin, origin.__name__))

    return value


def _number(value: object, hint: type[int | float], name: str, textual: bool) -> int | float:
    whole = hint is int
    if isinstance(value, str) and name.endswith(_IN_BYTES):
        return parse_bytes(value)
    if isinstance(value, str) and name.endswith("_s"):
        seconds = parse_seconds(value)
        return _kept(seconds.is_integer(), int(seconds), "whole seconds") if whole else seconds
    if isinstance(value, str) and textual:
        try:
            return hint(value)
        except ValueError:
            pass

    if isinstance(value, int) and not isinstance(value, bool):
        return hint(value)
    if isinstance(value, float) and not whole:
        return value

    raise _Refused("a whole number" if whole else "a number")


def _truth(text: str) -> bool:
    word = text.strip().lower()
    return _kept(word in _TRUE | _FALSE, word in _TRUE, "true or false")


def _one_of(value: object, options: tuple[object, ...], textual: bool) -> object:
    for option in options:
        if (value == option and type(value) is type(option)) or (textual and value == str(option)):
            return option

    raise _Refused(" or ".join(repr(option) for option in options))


def _sequence(value: object, hint: Any, name: str, textual: bool) -> tuple[object, ...]:
    if textual and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _Refused("a list")

    of = next(iter(get_args(hint)), Any)
    return tuple(fit(item, of, name, textual=textual) for item in cast("Sequence[object]", value))


def _of_class(value: object, class_: type, words: str) -> object:
    return _kept(isinstance(value, class_), value, words)


def _kept(fits: bool, value: T, wanted: str) -> T:
    if not fits:
        raise _Refused(wanted)

    return value
