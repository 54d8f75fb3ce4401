"""Options from a file, the environment and a call, laid over the defaults of a frozen dataclass."""

from __future__ import annotations

__all__ = (
    "ENVIRONMENT_PREFIX",
    "TABLES",
    "SourcedValue",
    "Table",
    "environment_of",
    "environment_table",
    "fit",
    "fit_fields",
    "given_leaves",
    "item_class",
    "load_options",
    "merged",
    "parse_bytes",
    "parse_seconds",
    "sourced",
)

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from fractions import Fraction
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import (
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    final,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from penstock.kernel.errors import ConfigError
from penstock.kernel.words import nearest

_BYTES: dict[str, int | Fraction] = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_BYTES.update({"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "TB": 10**12})
_SECONDS: dict[str, int | Fraction] = {"": 1, "s": 1, "min": 60, "h": 3600}
_SECONDS.update({"us": Fraction(1, 10**6), "ms": Fraction(1, 10**3)})
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Read a size, rounded down to whole bytes. Units are case-sensitive: `Mb` is not one.

    Raises:
        ValueError: If it is not one; the message shows examples.
    """
    quantity = _parse(text, _BYTES)
    if quantity is None:
        raise ValueError(f'{text!r} is not a number of bytes; write 1048576, "64MiB", "64MB" or "1.5GiB"')

    return int(quantity)


def parse_seconds(text: str) -> float:
    """Read a duration.

    Raises:
        ValueError: If it is not one; the message shows examples.
    """
    quantity = _parse(text, _SECONDS)
    if quantity is None:
        raise ValueError(f'{text!r} is not a number of seconds; write 0.5, "500ms", "5s", "2min" or "1h"')

    return float(quantity)


def _parse(text: str, units: dict[str, int | Fraction]) -> Fraction | None:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units:
        return None

    return Fraction(found[1]) * units[found[2]]


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


def fit_fields(options: Any, section: str) -> None:
    """Convert each field of a frozen dataclass to its type, as `fit` does. To be called in `__post_init__`.

    So what is given in Python may be written as in a file, `limit_bytes="2GiB"`, and is checked as there.

    Args:
        options: The new object.
        section: Where the options stand in a file, for the error.

    Raises:
        ConfigError: If one does not fit.
    """
    class_ = cast("Any", type(options))
    hints: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value: object = getattr(options, field.name)
        default: object = field.default
        made_by: object = field.default_factory
        is_default = value is default or made_by is type(value)
        if is_default or TABLES in field.metadata:
            continue

        hints = hints or _hints(class_)
        try:
            positive = bool(field.metadata.get("positive", False))
            found = fit(value, hints[field.name], field.name, positive=positive)
        except ValueError as error:
            raise ConfigError(_dotted(section, field.name), str(error)) from None

        if found is not value:
            object.__setattr__(options, field.name, found)


@lru_cache(maxsize=64)
def _hints(class_: type) -> dict[str, Any]:
    return get_type_hints(class_)


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
        return _require(callable(value), value, "a function")
    if isinstance(origin, type):
        return _of_class(value, origin, {str: "a text", bool: "true or false"}.get(origin, origin.__name__))

    return value


def _number(value: object, hint: type[int | float], name: str, textual: bool) -> int | float:
    whole = hint is int
    if isinstance(value, str) and name.endswith(_IN_BYTES):
        return parse_bytes(value)
    if isinstance(value, str) and name.endswith("_s"):
        seconds = parse_seconds(value)
        return _require(seconds.is_integer(), int(seconds), "whole seconds") if whole else seconds
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
    return _require(word in _TRUE | _FALSE, word in _TRUE, "true or false")


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
    return _require(isinstance(value, class_), value, words)


def _require(fits: bool, value: T, wanted: str) -> T:
    if not fits:
        raise _Refused(wanted)

    return value


ENVIRONMENT_PREFIX = "PENSTOCK_"
TABLES = "tables"
"""Metadata key of the field that collects sub-tables for which there is no field."""


@final
@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value and its source, which later errors name."""

    value: object
    source: str  #: a file name, an environment variable, `argument`
    key: str = ""  #: the whole dotted name
    textual: bool = False  #: text only because its source holds nothing else


Table: TypeAlias = "dict[str, SourcedValue | Table]"


@overload
def load_options(
    spec: type[T],
    *,
    section: str = "",
    toml: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    source: str = "argument",
) -> T: ...
@overload
def load_options(
    spec: T,
    *,
    section: str = "",
    toml: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    source: str = "argument",
) -> T: ...
def load_options(
    spec: type[T] | T,
    *,
    section: str = "",
    toml: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    source: str = "argument",
) -> T:
    """Make an instance of a dataclass: its defaults < `toml` < `environ` < `arguments`.

    A field may be an int, float, bool, str, a `Literal`, a tuple of these, a function, another
    dataclass, or a union. Its name says its unit (see `fit`), and `metadata={"positive": True}`
    refuses zero and less.

    Args:
        spec: A frozen dataclass, or an instance whose values are the defaults.
        section: Dotted name of the options, for errors and for the environment.
        toml: The section's table.
        environ: All variables; those whose names begin with that of the section count, as in
            `PENSTOCK_SAVE__WRITE__CONCURRENCY`.
        arguments: The section's options by name; sub-tables are mappings.
        source: What errors call the source of `arguments`.

    Raises:
        ConfigError: If an option is unknown or missing, or its value does not fit. The message
            names the option, the source, and the nearest known name.
    """
    table: Table = {}
    for layer in (
        sourced(toml or {}, "TOML", section),
        environment_table(environ or {}, section),
        sourced(arguments or {}, source, section),
    ):
        table = merged(table, layer)

    made: T = _build(spec, section, table)
    return made


def sourced(values: Mapping[str, object], source: str, section: str = "") -> Table:
    """Record the source of each value, at any depth."""
    table: Table = {}
    for name, value in values.items():
        if isinstance(value, SourcedValue):
            table[name] = value
        elif isinstance(value, Mapping):
            table[name] = sourced(cast("Mapping[str, object]", value), source, _dotted(section, name))
        else:
            table[name] = SourcedValue(value, source, _dotted(section, name))

    return table


def environment_table(environ: Mapping[str, str], section: str = "") -> Table:
    """Return the options of a section that variables set."""
    prefix = _variable(section, "") if section else ENVIRONMENT_PREFIX
    table: Table = {}
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue

        *outer, last = variable.removeprefix(prefix).lower().split("__")
        layer: Table = {last: SourcedValue(text, variable, _dotted(section, *outer, last), textual=True)}
        for name in reversed(outer):
            layer = {name: layer}
        table = merged(table, layer)

    return table


def environment_of(options: Any, section: str) -> dict[str, str]:
    """Return the variables by which another process gets the same options.

    Those that are None are left out, since no text stands for that.

    Args:
        options: An instance of a dataclass of options.
        section: Its name.
    """
    found: dict[str, str] = {}
    for each in dataclasses.fields(options):
        value = getattr(options, each.name)
        name = _dotted(section, each.name)
        if dataclasses.is_dataclass(value):
            found |= environment_of(value, name)
        elif isinstance(value, str | int | float):
            found[_variable(name)] = str(value).lower() if isinstance(value, bool) else str(value)

    return found


def merged(below: Table, above: Table) -> Table:
    """Lay one table over another."""
    table = dict(below)
    for name, value in above.items():
        before = table.get(name)
        both = isinstance(before, dict) and isinstance(value, dict)
        table[name] = merged(cast("Table", before), cast("Table", value)) if both else value

    return table


def given_leaves(table: Table, section: str = "") -> Iterator[tuple[str, SourcedValue]]:
    """Yield the dotted name of each value in a table, with the value and its source."""
    for name, given in table.items():
        key = _dotted(section, name)
        if isinstance(given, dict):
            yield from given_leaves(given, key)
        else:
            yield key, given


def _build(spec: Any, section: str, table: Table) -> Any:
    class_ = spec if isinstance(spec, type) else type(spec)
    hints = _hints(class_)
    fields = {field.name: field for field in dataclasses.fields(class_) if field.init}
    rest = next((field.name for field in fields.values() if TABLES in field.metadata), None)
    changes: dict[str, Any] = {}
    extra: dict[str, Table] = {}
    for name, given in table.items():
        if name in fields and name != rest:
            before = hints[name] if isinstance(spec, type) else getattr(spec, name)
            changes[name] = _value(fields[name], hints[name], before, _dotted(section, name), given)
        elif rest is not None and isinstance(given, dict):
            extra[name] = given
        else:
            raise _unknown(class_, section, name, given)

    if rest is not None and extra:
        changes[rest] = extra if isinstance(spec, type) else merged(getattr(spec, rest), cast("Table", extra))
    if not isinstance(spec, type):
        return _made(partial(dataclasses.replace, spec, **changes), table)

    for field in fields.values():
        if field.name not in changes and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(_dotted(section, field.name), "is required", "nowhere")

    return _made(partial(class_, **changes), table)


def _made(make: Callable[[], T], table: Table) -> T:
    """Call `make`; an error about an option names the source of that option."""
    try:
        return make()
    except ConfigError as error:
        given = table.get(error.key.rpartition(".")[2])
        if not isinstance(given, SourcedValue):
            raise

        raise ConfigError(given.key or error.key, error.problem, given.source) from None


def item_class(hint: Any) -> type | None:
    """Return the dataclass of a `tuple[OneOf, ...]`, which TOML writes as an array of tables; else None."""
    of = next(iter(get_args(hint)), None)
    return of if get_origin(hint) is tuple and isinstance(of, type) and dataclasses.is_dataclass(of) else None


def _items(class_: type, key: str, given: SourcedValue | Table) -> tuple[object, ...]:
    """Make a dataclass of each table in an array; errors say which one it is."""
    source = given if isinstance(given, SourcedValue) else next(_leaves(given), SourcedValue({}, "argument"))
    if source.textual:
        raise ConfigError(
            source.key or key, "cannot be set by a variable: write it into a file", source.source
        )
    value = None if isinstance(given, dict) else given.value
    if isinstance(given, dict) or not isinstance(value, list | tuple):
        raise ConfigError(key, f"must be an array of tables: write [[{key}]], once for each", source.source)

    items: list[object] = []
    for number, item in enumerate(cast("Sequence[object]", value)):
        name = f"{given.key or key}[{number}]"
        if isinstance(item, Mapping):
            table = sourced(cast("Mapping[str, object]", item), given.source, name)
            try:
                items.append(_build(class_, name, table))
            except ConfigError as error:
                if error.key.startswith(name):
                    raise

                # What one option alone does not show: it is missing, or does not go with another one.
                option = f"{name}.{error.key.rpartition('.')[2]}"
                raise ConfigError(option, error.problem, given.source) from None
        elif isinstance(item, class_):
            items.append(item)
        else:
            raise ConfigError(name, f"must be a table, not {item!r}", given.source)

    return tuple(items)


def _value(field: Field[Any], hint: Any, before: Any, key: str, given: SourcedValue | Table) -> object:
    of = item_class(hint)
    if of is not None:
        return _items(of, key, given)
    if dataclasses.is_dataclass(hint):
        if isinstance(given, SourcedValue):
            raise ConfigError(given.key or key, f"must be a table, not {given.value!r}", given.source)

        return _build(before, key, given)

    if isinstance(given, dict):
        leaf = next(_leaves(given), SourcedValue({}, "argument"))
        given = SourcedValue(_plain(given), leaf.source, key)
    try:
        positive = bool(field.metadata.get("positive", False))
        return fit(given.value, hint, field.name, textual=given.textual, positive=positive)
    except ValueError as error:
        raise ConfigError(given.key or key, str(error), given.source) from None


_MOST_SHOWN: Final = 8  #: names of options in an error; of the whole configuration there are 70


def _unknown(class_: type, section: str, name: str, given: SourcedValue | Table) -> ConfigError:
    asked = name
    while isinstance(given, dict) and given:
        inner, given = next(iter(given.items()))
        asked = _dotted(asked, inner)

    first = given if isinstance(given, SourcedValue) else SourcedValue(None, "argument")
    key = first.key or _dotted(section, asked)
    known = list(_known(class_))
    near = nearest(asked, known)
    shown = [key.removesuffix(asked) + option for option in ([near] if near else known)]
    if first.textual:
        shown = [_variable(option) for option in shown]

    listed = ", ".join(shown[:_MOST_SHOWN]) or "none"
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    hint = f"did you mean {shown[0]}?" if near else f"known here: {listed}{more}"
    return ConfigError(key, f"no such option; {hint}", first.source)


def _known(class_: type, section: str = "") -> Iterator[str]:
    hints = _hints(class_)
    for field in dataclasses.fields(class_):
        key = _dotted(section, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _known(cast("type", hints[field.name]), key)
        elif field.init and TABLES not in field.metadata:
            yield key


def _leaves(table: Table) -> Iterator[SourcedValue]:
    for given in table.values():
        yield from _leaves(given) if isinstance(given, dict) else (given,)


def _plain(table: Table) -> dict[str, object]:
    return {n: _plain(given) if isinstance(given, dict) else given.value for n, given in table.items()}


def _dotted(*names: str) -> str:
    return ".".join(name for name in names if name)


def _variable(*names: str) -> str:
    return ENVIRONMENT_PREFIX + "__".join(names).replace(".", "__").upper()
