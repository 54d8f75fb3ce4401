"""What the source of a class says about its fields: annotation, default and description.

The source is read and not imported: a stage imports jax, and to describe its options needs none of it.
"""

from __future__ import annotations

__all__ = ("FieldDoc", "fields_of")

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, final

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

    Descriptions are found in the section `Attributes:` of the docstring, in a text behind the field, or in a
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
        about = described.get(field) or _behind(node.body, at, lines)
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


def _behind(body: list[ast.stmt], at: int, lines: list[str]) -> str:
    """Return the text behind the statement at this place: a literal, or a comment."""
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
