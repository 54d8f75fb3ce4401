"""What users and writers of plug-ins import is where they look for it, and all that was public still is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.public_names import ENTRY_POINT_GROUPS, EVENTS, NAMES, OPTIONS

import penstock
from penstock.config import Config, TierOptions
from penstock.kernel import Pipeline
from penstock.pipelines import restore_pipeline, save_pipeline

ROOT = Path(__file__).parents[1]
FACE = ROOT / "src" / "penstock"
PUBLIC = {*NAMES, "penstock.api"}


def file_of(module: str) -> Path:
    return Path(str(import_module(module).__file__))


def library() -> Iterator[Path]:
    for part in ("kernel", "stages", "handlers"):
        yield from (ROOT / part).rglob("*.py")

    yield from (path for path in FACE.rglob("*.py") if not path.is_relative_to(FACE / "kernel"))


def lazy_doors() -> Iterator[str]:
    """The packages whose names are imported on first use."""
    for path in library():
        if path.name == "__init__.py" and "_lazy_names(" in path.read_text():
            inside = path.parent.relative_to(FACE if path.is_relative_to(FACE) else ROOT)
            yield ".".join(("penstock", *inside.parts))


LAZY = sorted(lazy_doors())


@pytest.mark.parametrize("module", NAMES)
def test_what_was_public_is_still_there(module: str) -> None:
    found = import_module(module)
    expected = set(NAMES[module].split())

    assert expected <= set(found.__all__)
    assert {name for name in expected if not hasattr(found, name)} == set()


def test_the_options_are_still_there() -> None:
    config = Config(tier=(TierOptions("memory"),))
    values = {table.name: getattr(config, table.name) for table in fields(Config)}
    tables = {name: fields(value[0] if isinstance(value, tuple) else value) for name, value in values.items()}
    found = {f"{table}.{option.name}" for table, options in tables.items() for option in options}
    for flow, pipeline in (("save", save_pipeline()), ("restore", restore_pipeline())):
        found |= {f"{flow}.{name}" for name in stage_options(pipeline)}

    assert set(OPTIONS.split()) <= found


def stage_options(pipeline: Pipeline[Any]) -> Iterator[str]:
    for slot in pipeline:
        if is_dataclass(slot.stage):
            yield from (f"{slot.name}.{option.name}" for option in fields(slot.stage) if option.init)


def test_the_events_and_the_entry_point_groups_are_still_there() -> None:
    texts: set[str] = set()
    for path in library():
        nodes = ast.walk(ast.parse(path.read_text()))
        texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str}

    assert {*EVENTS.split(), *ENTRY_POINT_GROUPS.split()} <= texts


def test_every_error_is_in_the_public_module() -> None:
    defined = vars(import_module("penstock.kernel.errors"))

    assert set(penstock.errors.__all__) == set(defined["__all__"])
    assert {
        name for name in defined["__all__"] if getattr(penstock.errors, name) is not defined[name]
    } == set()


@pytest.mark.parametrize("module", LAZY)
def test_the_checkers_and_the_interpreter_see_the_same_names(module: str) -> None:
    branches = next(node for node in ast.parse(file_of(module).read_text()).body if isinstance(node, ast.If))
    checked: dict[str, set[str]] = {}
    for node in branches.body:
        assert isinstance(node, ast.ImportFrom)
        checked.setdefault(str(node.module), set()).update(alias.name for alias in node.names)

    (table,) = [node for part in branches.orelse for node in ast.walk(part) if isinstance(node, ast.Dict)]
    interpreted = {home: set(names) for home, names in ast.literal_eval(table).items()}

    assert interpreted == checked
    public = set(import_module(module).__all__)
    assert public - {"__version__"} == {name for names in checked.values() for name in names}


@pytest.mark.parametrize("module", LAZY)
def test_each_public_name_is_found_and_listed(module: str) -> None:
    found: ModuleType = import_module(module)

    assert set(found.__all__) <= set(dir(found))
    assert {name for name in found.__all__ if getattr(found, name) is None} == set()


@pytest.mark.parametrize("module", LAZY)
def test_a_misspelt_name_raises_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match=rf"module '{re.escape(module)}' has no attribute 'typo'"):
        _ = import_module(module).typo


@pytest.fixture(scope="module")
def loaded() -> Mapping[str, str]:
    """The array libraries that each door is the first to load, of all that one process imports in turn."""
    program = """
import importlib, sys
for name in sys.argv[1:]:
    before = set(sys.modules)
    importlib.import_module(name)
    print(name, *sorted({"jax", "numpy", "tensorstore"} & (set(sys.modules) - before)))
"""
    command = [sys.executable, "-c", program, *LAZY, "penstock.errors", "numpy"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT / "src")
    return {name: found for name, _, found in [line.partition(" ") for line in run.stdout.splitlines()]}


@pytest.mark.parametrize("module", [*LAZY, "penstock.errors"])
def test_importing_it_loads_no_array_library(loaded: Mapping[str, str], module: str) -> None:
    assert loaded[module] == ""
    assert loaded["numpy"] == "numpy"  # so it would be seen


def shown() -> Iterator[tuple[str, str]]:
    """Every Python text that the documentation shows, with its place."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.parent.name == "design":
            continue  # says what was so on its day
        for text in re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            yield str(path.relative_to(ROOT)), text

    for path in sorted((ROOT / "docs" / "examples").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text()


def test_the_documentation_imports_from_the_public_names_alone() -> None:
    homes = [
        (place, home)
        for place, text in shown()
        for home in re.findall(r"^\s*(?:from|import) (penstock(?:\.[\w.]+)?)\s", text, re.MULTILINE)
    ]

    wrong = [(place, home) for place, home in homes if home not in PUBLIC and ".orbax." not in home]
    # The demo is behind the command line, and writes as that does.
    assert [(place, home) for place, home in wrong if not home.startswith("penstock.cli.")] == []
