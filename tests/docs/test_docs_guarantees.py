"""The tables of guarantees name tests; these tests exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("memory", "saving")
LINK = re.compile(r"\[`([^`\]]+)`\]\(([^)]+)\)")


def page(name: str) -> Path:
    return ROOT / "docs" / "design" / f"{name}.md"


def rows(name: str) -> list[str]:
    """The rows of the table of guarantees."""
    lines = page(name).read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if "where it is tested" in line)
    table = lines[start + 2 :]
    return table[: next(at for at, line in enumerate(table) if not line.startswith("|"))]


def links() -> Iterator[tuple[str, str, str]]:
    for name in PAGES:
        for row in rows(name):
            for label, target in LINK.findall(row):
                yield name, label, target


@pytest.mark.parametrize("name", PAGES)
def test_every_guarantee_is_linked_to_a_test(name: str) -> None:
    assert len(rows(name)) > 5
    for row in rows(name):
        assert LINK.search(row.split("|")[2]), row


@pytest.mark.parametrize(("name", "label", "target"), [*links()])
def test_the_test_exists(name: str, label: str, target: str) -> None:
    file, *names = label.split("::")
    path = (page(name).parent / target).resolve()
    assert path == ROOT / file
    tree = ast.parse(path.read_text())
    defined = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.AsyncFunctionDef | ast.FunctionDef)
    }
    assert set(names) <= defined
