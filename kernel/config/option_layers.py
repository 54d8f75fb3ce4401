"""Options from a file, the environment and a call, laid over the defaults of a frozen dataclass."""

from __future__ import annotations

__all__ = (
    "ENVIRONMENT_PREFIX",
    "TABLES",
    "Given",
    "Table",
    "environment_table",
    "given_leaves",
    "load_options",
    "merged",
    "sourced",
)

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast, final, get_type_hints, overload

from penstock.kernel.config.coercion import fit
from penstock.kernel.errors import ConfigError

T = TypeVar("T")

ENVIRONMENT_PREFIX = "PENSTOCK_"
TABLES = "tables"
"""Metadata key of the field that collects sub-tables for which there is no field."""


@final
@dataclass(frozen=True, slots=True)
class Given:
    """A value and its source, which later errors name."""

    value: object
    source: str  #: a file name, an environment variable, `argument`
    key: str = ""  #: the whole dotted name
    textual: bool = False  #: text only because its source holds nothing else


Table: TypeAlias = "dict[str, Given | Table]"


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
        if isinstance(value, Given):
            table[name] = value
        elif isinstance(value, Mapping):
            table[name] = sourced(cast("Mapping[str, object]", value), source, _dotted(section, name))
        else:
            table[name] = Given(value, source, _dotted(section, name))

    return table


def environment_table(environ: Mapping[str, str], section: str = "") -> Table:
    """Return the options of a section that variables set."""
    prefix = _variable(section, "") if section else ENVIRONMENT_PREFIX
    table: Table = {}
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue

        *outer, last = variable.removeprefix(prefix).lower().split("__")
        layer: Table = {last: Given(text, variable, _dotted(section, *outer, last), textual=True)}
        for name in reversed(outer):
            layer = {name: layer}
        table = merged(table, layer)

    return table


def merged(below: Table, above: Table) -> Table:
    """Lay one table over another."""
    table = dict(below)
    for name, value in above.items():
        before = table.get(name)
        both = isinstance(before, dict) and isinstance(value, dict)
        table[name] = merged(cast("Table", before), cast("Table", value)) if both else value

    return table


def given_leaves(table: Table, section: str = "") -> Iterator[tuple[str, Given]]:
    """Yield the dotted name of each value in a table, with the value and its source."""
    for name, given in table.items():
        key = _dotted(section, name)
        if isinstance(given, dict):
            yield from given_leaves(given, key)
        else:
            yield key, given


def _build(spec: Any, section: str, table: Table) -> Any:
    class_ = spec if isinstance(spec, type) else type(spec)
    hints = get_type_hints(class_)
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
        if not isinstance(given, Given):
            raise

        raise ConfigError(given.key or error.key, error.problem, given.source) from None


def _value(field: Field[Any], hint: Any, before: Any, key: str, given: Given | Table) -> object:
    if dataclasses.is_dataclass(hint):
        if isinstance(given, Given):
            raise ConfigError(given.key or key, f"must be a table, not {given.value!r}", given.source)

        return _build(before, key, given)

    if isinstance(given, dict):
        leaf = next(_leaves(given), Given({}, "argument"))
        given = Given(_plain(given), leaf.source, key)
    try:
        positive = bool(field.metadata.get("positive", False))
        return fit(given.value, hint, field.name, textual=given.textual, positive=positive)
    except ValueError as error:
        raise ConfigError(given.key or key, str(error), given.source) from None


def _unknown(class_: type, section: str, name: str, given: Given | Table) -> ConfigError:
    asked = name
    while isinstance(given, dict) and given:
        inner, given = next(iter(given.items()))
        asked = _dotted(asked, inner)

    first = given if isinstance(given, Given) else Given(None, "argument")
    key = first.key or _dotted(section, asked)
    known = list(_known(class_))
    near = get_close_matches(asked, known, n=1)
    shown = [key.removesuffix(asked) + option for option in near or known]
    if first.textual:
        shown = [_variable(option) for option in shown]

    hint = f"did you mean {shown[0]}?" if near else f"known here: {', '.join(shown) or 'none'}"
    return ConfigError(key, f"no such option; {hint}", first.source)


def _known(class_: type, section: str = "") -> Iterator[str]:
    hints = get_type_hints(class_)
    for field in dataclasses.fields(class_):
        key = _dotted(section, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _known(cast("type", hints[field.name]), key)
        elif field.init and TABLES not in field.metadata:
            yield key


def _leaves(table: Table) -> Iterator[Given]:
    for given in table.values():
        yield from _leaves(given) if isinstance(given, dict) else (given,)


def _plain(table: Table) -> dict[str, object]:
    return {n: _plain(given) if isinstance(given, dict) else given.value for n, given in table.items()}


def _dotted(*names: str) -> str:
    return ".".join(name for name in names if name)


def _variable(*names: str) -> str:
    return ENVIRONMENT_PREFIX + "__".join(names).replace(".", "__").upper()
