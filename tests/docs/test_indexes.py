"""The indexes of the documentation are complete: every decision and every room has its line."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design"
FACE = ROOT / "src" / "penstock"


def test_every_decision_is_in_the_index_once() -> None:
    linked = re.findall(r"\]\(([^)/]+\.md)\)", (DESIGN / "README.md").read_text())
    pages = [path.name for path in DESIGN.glob("*.md") if path.name != "README.md"]

    assert sorted(linked) == sorted(pages)


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The map")[2]
    on_the_map = {line.split("`")[1].rstrip("/") for line in text.splitlines() if line.startswith("| `")}
    rooms = {path.parent for part in ("kernel", "stages", "handlers") for path in (ROOT / part).rglob("*.py")}
    rooms |= {path.parent for path in FACE.rglob("*.py")}
    names = {str(room.relative_to(ROOT)) for room in rooms}
    names -= {name for name in names if re.match(r"src/penstock/(kernel|stages|handlers)(/|$)", name)}
    names = {name for name in names if not name.startswith("src/penstock/orbax/")}  # one line for all of it

    assert on_the_map == names


def test_the_architecture_names_files_that_are_there() -> None:
    page = ROOT / "docs" / "explanation" / "architecture.md"
    text = page.read_text()
    named = re.findall(r"`((?:kernel|stages|handlers|src|tests)/[\w/.]*)`", text)
    named += [f"handlers/{name}" for name in re.findall(r"`((?:leaves|formats)/\w+\.py)`", text)]
    linked = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]

    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [target for target in linked if not (page.parent / target).exists()] == []
