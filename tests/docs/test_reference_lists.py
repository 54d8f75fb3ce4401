"""The lists of docs/reference and the code name the same errors, events and commands."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

from penstock import errors, stages
from penstock.cli import COMMANDS
from penstock.errors import PenstockError
from penstock.kernel import Milestone
from penstock.kernel import errors as errors_module
from penstock.kernel.messages import ChangeKind

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
LEVELS = ("debug", "info", "warning", "error", "exception")
PART_NAMES = {
    "save.": {f"save.{each.name.lower()}" for each in Milestone if each is not Milestone.FINALIZED},
    "restore.": {f"restore.{kind}" for kind in get_args(ChangeKind)},
}
"""What f-strings that begin so stand for."""


def rows(page: str) -> list[list[str]]:
    """The cells of every row of a page's tables."""
    lines = (REFERENCE / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


class TestErrors:
    def classes(self) -> dict[str, type[PenstockError]]:
        found = {name: getattr(errors, name) for name in errors.__all__}
        return {
            name: each
            for name, each in found.items()
            if issubclass(each, PenstockError) and each is not PenstockError
        }

    def test_every_error_has_one_row_and_every_row_an_error(self) -> None:
        listed = [name for first, *_ in rows("errors.md") for name in quoted(first)]

        assert sorted(listed) == sorted(self.classes())

    def test_each_error_is_listed_below_its_family(self) -> None:
        family = ""
        for first, *_ in rows("errors.md"):
            if first.startswith("**"):
                family = first.strip("*`")
            elif quoted(first):
                bases = [each.__name__ for each in self.classes()[quoted(first)[0]].__mro__]
                expected = family if family != "Of no family" else "PenstockError"
                assert bases[1] == expected or expected in bases[2:], (first, family)
                assert family != "Of no family" or bases[1] == "PenstockError"

    def test_each_error_has_the_bases_and_attributes_of_its_row(self) -> None:
        text = inspect.getsource(errors_module)  # the classes are shown as those of `penstock.errors`
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        sources = {node.name: ast.get_source_segment(text, node, padded=True) or "" for node in classes}
        for first, when, also in (row for row in rows("errors.md") if quoted(row[0])):
            error = self.classes()[quoted(first)[0]]
            assert set(quoted(also)) <= {each.__name__ for each in error.__mro__}
            source = "".join([sources.get(each.__name__, "") for each in error.__mro__])
            for named in re.findall(r"\((`[^)]*)\)", when):
                attributes = [name for name in quoted(named.partition(";")[0]) if name.islower()]
                assert [
                    name
                    for name in attributes
                    if not re.search(rf"(?:self\.|^    ){name}\b", source, re.MULTILINE)
                ] == [], first


@cache
def sources() -> list[ast.Module]:
    """The modules that can log something."""
    parts = ("kernel", "stages", "handlers", "src")
    texts = [path.read_text() for part in parts for path in sorted((ROOT / part).rglob("*.py"))]
    return [ast.parse(text) for text in texts if re.search(r"events|logger|getLogger", text)]


def logged_names(value: ast.expr, constants: dict[str, str]) -> set[str]:
    """The events that an argument of the logger stands for."""
    match value:
        case ast.Constant(value=str(name)):
            return {name}
        case ast.IfExp(body=body, orelse=orelse):
            return logged_names(body, constants) | logged_names(orelse, constants)
        case ast.JoinedStr(values=[ast.Constant(value=str(begin)), *_]):
            return PART_NAMES[begin]
        case ast.Name(id=name) if name in constants:
            return {constants[name]}
        case _:
            return set()


@cache
def calls() -> list[tuple[str, str, set[str]]]:
    """The events that the code logs, each with its level and its fields."""
    found: list[tuple[str, str, set[str]]] = []
    through: dict[str, tuple[str, int, set[str]]] = {}  # functions that are given an event to log
    modules = sources()
    for module in modules:
        for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
            arguments = [each.arg for each in function.args.args if each.arg != "self"]
            for call, level in _of_loggers(function):
                if isinstance(call.args[0], ast.Name) and call.args[0].id in arguments:
                    through[function.name] = (level, arguments.index(call.args[0].id), _fields(call))

    for module in modules:
        constants = {
            node.target.id: node.value.value
            for node in module.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        for call, level in _of_loggers(module):
            found += [(name, level, _fields(call)) for name in logged_names(call.args[0], constants)]
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in through:
                level, at, fields = through[name]
                found += [
                    (each, level, fields | _fields(call)) for each in logged_names(call.args[at], constants)
                ]

    return found


def _fields(call: ast.Call) -> set[str]:
    return {each.arg for each in call.keywords if each.arg}


def _of_loggers(node: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for call in ast.walk(node):
        match call:
            case ast.Call(func=ast.Attribute(value=value, attr=level), args=[_, *_]) if level in LEVELS:
                if re.search(r"events$|get_logger\(\)$", ast.unparse(value)):
                    yield call, "error" if level == "exception" else level
            case _:
                pass


class TestEvents:
    def listed(self) -> dict[str, tuple[str, set[str]]]:
        return {
            name: (level, set(quoted(fields)))
            for first, level, fields, _ in rows("events.md")
            for name in quoted(first)
        }

    def test_every_event_is_listed_and_every_listed_event_is_logged(self) -> None:
        logged = {name for name, *_ in calls()}

        assert len(logged) > 50
        assert logged == set(self.listed())

    def test_levels_and_fields_are_those_of_the_code(self) -> None:
        listed = self.listed()
        for name, level, fields in calls():
            assert level == listed[name][0], name
            assert fields <= listed[name][1], name

    def test_there_is_no_other_logger(self) -> None:
        """Whoever listens to the logger `penstock` hears all."""
        others: list[Any] = [
            ast.unparse(node)
            for module in sources()
            for node in ast.walk(module)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("structlog.get_logger", "logging.getLogger")
        ]

        assert set(others) == {"logging.getLogger(LOGGER_NAME)", "structlog.get_logger(LOGGER_NAME)"}


class TestStages:
    def test_every_stage_is_listed_with_its_options(self) -> None:
        listed: dict[str, set[str]] = {}
        for first, _, _, options, *_ in rows("stages.md"):
            for name in quoted(first)[:1]:
                listed.setdefault(name, set()).update(quoted(options))

        classes = {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): name for name in stages.__all__}
        found = {
            name: {each.name for each in dataclasses.fields(getattr(stages, classes[name]))}
            for name in classes
        }

        assert found == {name: listed.get(name) for name in classes}


class TestCommands:
    def test_every_command_is_listed(self) -> None:
        names = [
            name.split()[0]
            for first, *_ in rows("command-line.md")
            for name in re.findall(r"`([^`]+)`", first)
        ]

        assert sorted(names) == sorted(COMMANDS)
