"""Every key of the configuration, with its type, unit, default and effect."""

from __future__ import annotations

__all__ = (
    "STAGES",
    "OptionEntry",
    "as_toml",
    "config_page",
    "config_schema",
    "effective_options",
    "every_option",
    "literals",
    "masked",
)

import ast
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Final, cast, final, get_type_hints

from penstock.config.config import Config, given_layers
from penstock.kernel.options import TABLES, SourcedValue, given_leaves, item_class

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

    @property
    def heading(self) -> str:
        """The table as a file begins it: `[memory]`, or `[[tier]]` of an array."""
        return f"[[{self.section}]]" if self.section in _arrays() else f"[{self.section}]"


def every_option() -> list[OptionEntry]:
    """Return every key that there is without plug-ins, in the order of the documentation."""
    return list(_options(Config(), ""))


@lru_cache(maxsize=1)
def _arrays() -> Mapping[str, type]:
    """Return the arrays of tables by name, with the class of one table."""
    hints = get_type_hints(Config)
    found = {name: item_class(hint) for name, hint in hints.items()}
    return {name: of for name, of in found.items() if of is not None}


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
        elif key not in _arrays() and field.init and TABLES not in field.metadata:
            yield _entry(key, docs[field.name], as_toml(value, _unit(key, "number")))

    for key, value in tables:
        yield from _options(value, key)

    if not section:
        for key, of in _arrays().items():
            for name, doc in fields_of(of.__module__, of.__name__).items():
                yield _entry(f"{key}.{name}", doc, _written(doc.default))

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
        named = {"MOST_EXPANSION": "1000", "TIGHT": as_toml("1GiB")}  # constants of modules
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


# The source is read and not imported: a stage imports jax, and to describe its options needs none of it.
_ENTRY: Final = re.compile(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


@final
@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One field of a dataclass, as its source has it."""

    name: str
    annotation: ast.expr
    default: ast.expr | None
    about: str  #: "" if nothing is said
    positive: bool  #: whether zero and less are refused


def fields_of(module: str, class_: str) -> dict[str, FieldDoc]:
    """Return the fields of a class, those that it inherits from classes in the same module first.

    Descriptions are found in the section `Attributes:` of the docstring, in a text after the field, or in a
    comment that begins with `#:`.
    """
    tree, lines = _parsed(module)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return _fields(classes, class_, lines)


def _fields(classes: dict[str, ast.ClassDef], name: str, lines: list[str]) -> dict[str, FieldDoc]:
    node = classes[name]
    found: dict[str, FieldDoc] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= _fields(classes, base.id, lines)

    described = _attributes(ast.get_docstring(node, clean=False) or "")
    for at, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if ast.unparse(statement.annotation).startswith("ClassVar"):
            continue

        field = statement.target.id
        about = described.get(field) or _text_after(node.body, at, lines)
        if not about and field in found:
            about = found[field].about

        default, positive = _default(statement.value)
        found[field] = FieldDoc(field, statement.annotation, default, about, positive)

    for field, about in described.items():
        if field in found and not found[field].about:
            before = found[field]
            found[field] = FieldDoc(field, before.annotation, before.default, about, before.positive)

    return found


def _default(value: ast.expr | None) -> tuple[ast.expr | None, bool]:
    """Return the default, and whether the field is marked as positive."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return value, False

    given = {keyword.arg: keyword.value for keyword in value.keywords}
    positive = "positive" in ast.unparse(given["metadata"]) if "metadata" in given else False
    return given.get("default", given.get("default_factory")), positive


def _text_after(body: list[ast.stmt], at: int, lines: list[str]) -> str:
    """Return the text after the statement at this place: a literal, or a comment."""
    following = body[at + 1] if at + 1 < len(body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return _joined(str(following.value.value))

    end = body[at].end_lineno or body[at].lineno
    _, found, comment = lines[end - 1].partition("#:")
    return _joined(comment) if found else ""


def _attributes(docstring: str) -> dict[str, str]:
    _, found, behind = docstring.partition("Attributes:\n")
    if not found:
        return {}

    section = "\n".join(line.removeprefix("    ") for line in _indented(behind))
    return {name: _joined(text) for name, text in _ENTRY.findall(section)}


def _indented(text: str) -> Iterator[str]:
    """Yield lines up to the next section."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("        "):
            return

        yield line


def _joined(text: str) -> str:
    return " ".join(text.split())


@lru_cache(maxsize=64)
def _parsed(module: str) -> tuple[ast.Module, list[str]]:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    source = Path(spec.origin).read_text(encoding="utf-8")
    return ast.parse(source), source.splitlines()


_TYPES: Final = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
_QUANTITY: Final = {
    "bytes": r"^[0-9]+(\.[0-9]+)? ?(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?$",
    "seconds": r"^[0-9]+(\.[0-9]+)? ?(s|min|h|us|ms)?$",
}
_OPEN: Final = ("save", "restore")  #: tables that may have further tables, of stages from elsewhere


def config_schema() -> dict[str, Any]:
    """Return the schema, of the draft 2020-12."""
    properties: dict[str, Any] = {}
    for entry in every_option():
        table = _table(properties, entry.section)
        table["properties"][entry.name] = _property(entry)

    own = {name: dict(table) for name, table in properties.items()}
    profile = {"type": "object", "properties": own, "additionalProperties": False}
    properties["profiles"] = {
        "description": "Options over those of the file, chosen by PENSTOCK_PROFILE or by an argument.",
        "type": "object",
        "additionalProperties": {"$ref": "#/$defs/profile"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "penstock.toml",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {"profile": profile},
    }


def _table(properties: dict[str, Any], section: str) -> dict[str, Any]:
    table: dict[str, Any] = {"properties": properties}
    path = ""
    for name in section.split("."):
        path = f"{path}.{name}".strip(".")
        if path in _arrays():
            array = table["properties"].setdefault(name, {"type": "array", "items": {}})
            found = array["items"]
            found.setdefault("type", "object")
            found.setdefault("properties", {})
        else:
            found = table["properties"].setdefault(name, {"type": "object", "properties": {}})

        found["additionalProperties"] = {"type": "object"} if path in _OPEN else False
        table = found

    return table


def _property(entry: OptionEntry) -> dict[str, Any]:
    kinds = list(_kinds(entry.annotation, entry))
    about = f"{entry.effect} Default: {entry.default}."
    return {"description": about, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}


def _kinds(annotation: ast.expr, entry: OptionEntry) -> Iterator[dict[str, Any]]:
    if isinstance(annotation, ast.BinOp):
        yield from _kinds(annotation.left, entry)
        yield from _kinds(annotation.right, entry)
    elif isinstance(annotation, ast.Subscript):
        if ast.unparse(annotation.value) == "Literal":
            yield {"enum": list(literals(annotation))}
        elif ast.unparse(annotation.value) == "tuple":
            item = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
            yield {"type": "array", "items": next(_kinds(item, entry))}
    else:
        name = ast.unparse(annotation)
        if name in _TYPES:
            kind: dict[str, Any] = {"type": _TYPES[name]}
            if name in {"int", "float"} and entry.positive:
                kind["exclusiveMinimum"] = 0
            yield kind
            if name in {"int", "float"} and entry.unit:
                yield {"type": "string", "pattern": _QUANTITY[entry.unit]}


_HEAD = """# Configuration

Every key of `penstock.toml`, with its type, unit, default and effect. A test keeps this page as
`penstock config reference --markdown` prints it. [Configure it](../howto/configure.md) says where the file is
looked for, and how profiles and the environment go over it.

A key of bytes takes a number, or a text such as `"64MiB"`; one of seconds a number, or a text such as
`"500ms"`. In the environment `save.write.concurrency` is `PENSTOCK_SAVE__WRITE__CONCURRENCY`. Editors
complete and check the file by [penstock.schema.json](penstock.schema.json): a first line
`#:schema PATH` names it.
"""


def config_page() -> str:
    """Return the page as Markdown."""
    return _HEAD + "".join(_sections())


def _sections() -> Iterator[str]:
    for heading, entries in groupby(every_option(), lambda entry: entry.heading):
        yield f"\n## `{heading}`\n\n| key | type | default | effect |\n| --- | --- | --- | --- |\n"
        yield from map(_row, entries)


def _row(entry: OptionEntry) -> str:
    kind = f"{entry.type}, {entry.unit}" if entry.unit else entry.type
    cells = (f"`{entry.name}`", kind, entry.default, entry.effect)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


_SECRET: Final = re.compile(
    r"(?:^|_)(?:secret|password|passphrase|token|credentials?|private)(?:_|$)|(?:^|_)key$", re.IGNORECASE
)

_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY: Final = re.compile(r"(?<=[?&])([\w-]*(?:sig|key|token|secret)[\w-]*)=[^&\s\x22]+", re.IGNORECASE)
_HIDDEN: Final = "********"


@final
@dataclass(frozen=True, slots=True)
class EffectiveOption:
    """One option as it is."""

    key: str
    value: str  #: as TOML writes it; secrets are masked
    source: str  #: `default`, a file, an environment variable or `argument`


def effective_options(
    path: str | os.PathLike[str] | None = None,
    *,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[EffectiveOption]:
    """Return every option, as `Config.load` would find it. Blocking.

    Raises:
        ConfigError: What `Config.load` raises.
    """
    table = given_layers(path, profile=profile, environ=environ)
    config = Config.load(path, profile=profile, environ=environ)
    sources = {key: given.source for key, given in given_leaves(table)}
    values = dict(_values(config, ""))
    shown: list[EffectiveOption] = []
    for entry in every_option():
        if entry.section in _arrays():
            continue  # there may be none of them, or several

        value = values.pop(entry.key, ...)
        text = entry.default if value is ... else as_toml(value, entry.unit)
        shown.append(EffectiveOption(entry.key, masked(entry.key, text), sources.get(entry.key, "default")))

    # What is left are arrays of tables, and options of stages that are not penstock's own.
    shown += [
        EffectiveOption(
            key, masked(key, as_toml(value)), sources.get(key, sources.get(_array_of(key), "default"))
        )
        for key, value in values.items()
    ]
    return shown


def masked(key: str, value: str) -> str:
    """Return a value without what should not be seen: that of a secret, and passwords in URLs."""
    if _SECRET.search(key.rpartition(".")[2]) and value != "(none)":
        return _HIDDEN

    return _QUERY.sub(rf"\1={_HIDDEN}", _IN_URL.sub(f"{_HIDDEN}@", value))


def _values(options: Any, section: str) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        key = f"{section}.{field.name}".strip(".")
        if TABLES in field.metadata:
            yield from ((f"{section}.{at}", given.value) for at, given in _given(value, ""))
        elif dataclasses.is_dataclass(value):
            yield from _values(value, key)
        elif key in _arrays():
            for number, item in enumerate(value):
                yield from _values(item, f"{key}[{number}]")
        else:
            yield key, value


def _array_of(key: str) -> str:
    """Return the name of the array that an option is in: `tier` of `tier[0].path`."""
    return key.partition("[")[0]


def _given(table: Mapping[str, Any], section: str) -> Iterator[tuple[str, SourcedValue]]:
    for name, given in table.items():
        key = f"{section}.{name}".strip(".")
        if isinstance(given, SourcedValue):
            yield key, given
        else:
            yield from _given(given, key)
