"""Every key of the configuration, with its type, unit, default and effect."""

from __future__ import annotations

__all__ = ("STAGES", "OptionEntry", "as_toml", "every_option", "literals")

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast, final

from penstock.configuration.option_docs import FieldDoc, fields_of
from penstock.kernel.config.config import Config
from penstock.kernel.config.option_layers import TABLES

STAGES: Final[Mapping[str, Mapping[str, str]]] = {
    "save": {
        "flatten": "Flatten",
        "prioritise": "Prioritise",
        "device_to_host": "DeviceToHost",
        "encode": "Encode",
        "limit_bytes": "LimitBytes",
        "write": "Write",
        "commit": "Commit",
        "finalize": "Finalize",
    },
    "restore": {
        "locate": "Locate",
        "plan": "Plan",
        "prioritise": "Prioritise",
        "limit_bytes": "LimitBytes",
        "read": "Read",
        "host_to_device": "HostToDevice",
        "assemble": "Assemble",
    },
}
"""The stages of each flow, and their classes; a test compares them with the pipelines."""

_WORDS: Final = {
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "str": "text",
    "None": "none",
}


@final
@dataclass(frozen=True, slots=True)
class OptionEntry:
    """One key."""

    key: str  #: as in `save.write.concurrency`
    type: str  #: in words
    unit: str  #: "bytes", "seconds" or ""
    default: str  #: as TOML writes it; in words where it depends on something
    effect: str
    annotation: ast.expr
    positive: bool

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def every_option() -> list[OptionEntry]:
    """Return every key that there is without plug-ins, in the order of the documentation."""
    return list(_options(Config(), ""))


def _options_of_stage(flow: str, stage: str) -> list[OptionEntry]:
    """Return the keys of one stage."""
    class_ = STAGES[flow][stage]
    fields = fields_of(f"penstock.stages.{stage}", class_)
    return [_entry(f"{flow}.{stage}.{name}", doc, _written(doc.default)) for name, doc in fields.items()]


def _options(options: Any, section: str) -> Iterator[OptionEntry]:
    docs = fields_of(options.__class__.__module__, options.__class__.__name__)
    tables: list[tuple[str, Any]] = []
    for field in dataclasses.fields(options):
        key, value = _dotted(section, field.name), getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            tables.append((key, value))
        elif field.init and TABLES not in field.metadata:
            yield _entry(key, docs[field.name], as_toml(value, _unit(key, "number")))

    for key, value in tables:
        yield from _options(value, key)

    if section in STAGES:
        for stage in STAGES[section]:
            yield from _options_of_stage(section, stage)


def _entry(key: str, doc: FieldDoc, default: str) -> OptionEntry:
    words = " or ".join(_types(doc.annotation))
    return OptionEntry(key, words, _unit(key, words), default, doc.about, doc.annotation, doc.positive)


def _unit(key: str, words: str) -> str:
    if key.endswith(("_bytes", "_byte_size", "_file_size")):
        return "bytes"

    return "seconds" if key.endswith("_s") and "number" in words else ""


def _types(annotation: ast.expr) -> Iterator[str]:
    """Yield what a value may be, in words."""
    if isinstance(annotation, ast.BinOp):
        yield from _types(annotation.left)
        yield from _types(annotation.right)
    elif isinstance(annotation, ast.Subscript):
        of = ast.unparse(annotation.value)
        if of == "Literal":
            yield from (as_toml(value) for value in literals(annotation))
        elif of == "tuple":
            item = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
            yield f"list of {' or '.join(_types(item))}s"
    else:
        text = ast.unparse(annotation)
        if text != "None":
            yield _WORDS.get(text, text)


def literals(annotation: ast.Subscript) -> tuple[object, ...]:
    """Return the values of a `Literal`."""
    found: object = ast.literal_eval(annotation.slice)
    return cast("tuple[object, ...]", found) if isinstance(found, tuple) else (found,)


def _written(default: ast.expr | None) -> str:
    if default is None:
        return "(required)"
    try:
        return as_toml(ast.literal_eval(default))
    except ValueError:
        named = {"MOST_EXPANSION": "1000"}  # a constant of the module
        return named.get(ast.unparse(default), "(depends on the machine)")


def as_toml(value: object, unit: str = "") -> str:
    """Return a value as TOML writes it, whole bytes with their unit; `(none)` for None, which it has not."""
    if value is None:
        return "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, cast('tuple[object, ...]', value)))}]"
    if isinstance(value, int) and unit == "bytes":
        return _with_unit(value)

    return str(value)


def _with_unit(nbytes: int) -> str:
    """Return a number of bytes as a text with the largest unit that divides it."""
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << power) == 0:
            return f'"{nbytes >> power}{name}"'

    return str(nbytes)


def _dotted(*names: str) -> str:
    return ".".join(name for name in names if name)
