"""Pages that state guarantees link tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design"
LINK = re.compile(r"\[(test_\w+)\]\(([^)]+\.py)\)")
ALL = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in ALL if LINK.search(page.read_text())]


def names_in(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_tests_that_a_page_links_exist(page: Path) -> None:
    links: list[tuple[str, str]] = LINK.findall(page.read_text())
    missing = [name for name, file in links if name not in names_in((page.parent / file).resolve())]

    assert missing == []


def test_every_row_of_the_guarantees_links_a_test() -> None:
    page = (DESIGN / "saving.md").read_text()
    page = page.partition("## Cancellation and failure\n")[2].partition("\n## ")[0]
    rows = [
        line for line in page.split("\n") if line.startswith("|") and not line.startswith(("| what", "| ---"))
    ]

    assert len(rows) > 15
    assert [row for row in rows if not LINK.search(row)] == []
