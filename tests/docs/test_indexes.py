"""The indexes of the documentation are complete, and what its pages name is there."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

from penstock import errors
from penstock.pipelines import restore_pipeline, save_pipeline

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design"
FACE = ROOT / "src" / "penstock"


def test_every_decision_is_in_the_index_once() -> None:
    linked = re.findall(r"\]\(([^)/]+\.md)\)", (DESIGN / "README.md").read_text())
    pages = [path.name for path in DESIGN.glob("*.md") if path.name != "README.md"]

    assert sorted(linked) == sorted(pages)


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The map")[2].partition("### The tests")[0]
    on_the_map = {line.split("`")[1].rstrip("/") for line in text.splitlines() if line.startswith("| `")}
    rooms = {path.parent for part in ("kernel", "stages", "handlers") for path in (ROOT / part).rglob("*.py")}
    rooms |= {path.parent for path in FACE.rglob("*.py")}
    names = {str(room.relative_to(ROOT)) for room in rooms}
    names -= {name for name in names if re.match(r"src/penstock/(kernel|stages|handlers)(/|$)", name)}
    names = {name for name in names if not name.startswith("src/penstock/orbax/")}  # one line for all of it

    modules = {name for name in on_the_map if name.endswith(".py")}  # deep enough to be a room of one file
    assert on_the_map - modules == names
    assert [name for name in modules if not (ROOT / name).is_file()] == []


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PARTS = ("kernel", "stages", "handlers", "src", "tests", "docs")


def expanded(name: str) -> list[str]:
    """The names that `a/{b,c}.py` stands for."""
    before, _, rest = name.partition("{")
    inside, _, behind = rest.partition("}")
    return [f"{before}{each}{behind}" for each in inside.split(",")]


def named_files(text: str) -> list[str]:
    """Files and folders between backticks, such as `kernel/events.py`, `tests/bench/` and `write.py`."""
    quoted = re.findall(r"`([\w./{},-]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    names = [name for each in quoted for name in expanded(each)]
    return [
        name for name in names if name.endswith(".py") or name.startswith(tuple(f"{part}/" for part in PARTS))
    ]


def file_names() -> set[str]:
    """The names of all modules, without their folders."""
    return {path.name for part in PARTS for path in (ROOT / part).rglob("*.py")}


def is_there(name: str) -> bool:
    """Whether `penstock.a.b` is a module or a name in one."""
    module, _, rest = name.partition(".")
    found: object = importlib.import_module(module)
    while rest:
        first, _, rest = rest.partition(".")
        module = f"{module}.{first}"
        try:
            found = getattr(found, first)
        except AttributeError:
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError:
                return False

    return True


def test_files_that_pages_name_are_there() -> None:
    names = file_names()
    named = [(page.name, name) for page in PAGES for name in named_files(page.read_text())]

    assert len(named) > 50
    assert [each for each in named if not (each[1] in names or (ROOT / each[1]).exists())] == []


def test_files_that_pages_link_are_there() -> None:
    linked = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target
    ]

    assert len(linked) > 100
    assert [each for each in linked if not (each[0].parent / each[1]).exists()] == []


def test_modules_and_names_that_pages_mention_are_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(penstock(?:\.\w+)+)", page.read_text())}
    named -= {"penstock.toml", "penstock.codecs"}  # a file, and a group of entry points

    assert len(named) > 20
    assert [name for name in sorted(named) if not is_there(name)] == []


def test_every_error_has_its_line() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()

    assert [name for name in errors.__all__ if f"`{name}`" not in page] == []


def test_the_picture_is_drawn_from_its_script() -> None:
    folder = ROOT / "docs" / "explanation"
    script = runpy.run_path(str(folder / "draw_architecture.py"))

    assert (folder / "architecture.svg").read_text() == script["picture"]()
    assert tuple(script["SAVE"].split()) == save_pipeline().names
    assert tuple(script["RESTORE"].split()) == restore_pipeline().names
    for part, boxes in (("kernel", script["KERNEL"]), ("handlers", script["HANDLERS"])):
        rooms = {f"{path.parent.name}/" for path in (ROOT / part).glob("*/__init__.py")}
        assert {name for name, *_ in boxes} == rooms
