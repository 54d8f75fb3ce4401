"""Each part of docs/reference/guarantees.md names a test that exists, or says that there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "guarantees.md"
MAKEFILE = PAGE.parents[2] / "Makefile"
LINK = re.compile(r"\[(test_\w+)\]\(([^)]+\.py)\)")
PROMISES = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
UNTESTED = ("not tested", "The whole suite, on ext4, by `make test-all`")


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("text", PROMISES, ids=[text.partition("\n")[0] for text in PROMISES])
def test_each_promise_has_its_test(text: str) -> None:
    promised = "**Promised:**" in text
    text, _, shown = text.partition("**Shown by:**")
    shown = re.split(r"^## ", shown, flags=re.MULTILINE)[0].strip()
    links: list[tuple[str, str]] = LINK.findall(shown)

    assert promised or "**Not promised:**" in text
    assert [name for name, path in links if name not in names_in((PAGE.parent / path).resolve())] == []
    if not links:
        assert shown.rstrip(".") in UNTESTED
        assert not promised or shown != "not tested."


def test_programs_that_the_page_names_are_there() -> None:
    targets = set(re.findall(r"`make ([\w-]+)`", PAGE.read_text()))

    assert targets
    assert {target for target in targets if f"\n{target}:" not in MAKEFILE.read_text()} == set()


CELL = re.compile(r"^\| ")
NAMED = re.compile(r"^\[([\w-]+)\]: (\S+\.py) \"(test_\w+)\"$", re.MULTILINE)
WITHOUT = {"all of it, as of all hosts"}
"""Cells that say what follows from another one."""


def tier_cells() -> list[str]:
    """The cells of the table of what tiers lose, without the names of rows."""
    (text,) = [text for text in PROMISES if text.startswith("A step that is kept in a tier\n")]
    rows = [line.strip("|").split("|") for line in text.splitlines() if CELL.match(line)]
    return [cell.strip() for row in rows[2:] for cell in row[1:]]


def test_each_cell_of_the_table_of_tiers_names_a_test_that_exists() -> None:
    named = {name: (path, test) for name, path, test in NAMED.findall(PAGE.read_text())}
    cells = tier_cells()

    assert len(cells) == 24
    assert [cell for cell in cells if not re.search(r"\]\[[\w-]+\]", cell) and cell not in WITHOUT] == []
    used = {name for cell in cells for name in re.findall(r"\]\[([\w-]+)\]", cell)}
    assert used == set(named)
    for path, test in named.values():
        assert test in names_in((PAGE.parent / path).resolve())
