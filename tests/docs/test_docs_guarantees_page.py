"""Each row of docs/reference/guarantees.md names a test that exists, or says that there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "guarantees.md"
MAKEFILE = PAGE.parents[2] / "Makefile"
LINK = re.compile(r"\[(test_\w+)\]\(([^)]+\.py)\)")
TABLES = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
ROWS = [row for row in TABLES if not row.endswith(("| shown by |", "| --- |"))]
UNTESTED = ("not tested", "The whole suite, on ext4, by `make test-all`")


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_each_promise_has_its_test(row: str) -> None:
    _, what, promised, _, shown, _ = row.split("|")
    links: list[tuple[str, str]] = LINK.findall(shown)

    assert [name for name, path in links if name not in names_in((PAGE.parent / path).resolve())] == []
    if not links:
        assert shown.strip() in UNTESTED, what
        assert not promised.strip() or shown.strip() != "not tested", what


def test_programs_that_the_page_names_are_there() -> None:
    targets = set(re.findall(r"`make ([\w-]+)`", PAGE.read_text()))

    assert targets
    assert {target for target in targets if f"\n{target}:" not in MAKEFILE.read_text()} == set()
