"""Each option of the public API is shown by a test, or the page of differences says that it does nothing.

An option is a parameter with a default. A case (`shown_options`) shows it, a test that calls what has
it with it, by name or by place, or a sibling that hands it on. What is left is in `WITHOUT_EFFECT`.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.orbax_face import (
    test_options_of_checkpointers,
    test_options_of_functions,
    test_options_of_handlers,
    test_options_of_managers,
)
from tests.orbax_face.differences import PAGE
from tests.orbax_face.without_effect import WITHOUT_EFFECT

import penstock.orbax
import penstock.orbax.v1

TESTS = Path(__file__).parents[1]
SOURCES = Path(penstock.orbax.__file__).parent
ROOMS = ("orbax_face", "interop", "processes", "docs")
RECORDS = {
    *("metadata.RootMetadata", "metadata.StepMetadata", "metadata.TreeMetadata", "v1.CheckpointMetadata"),
    *("v1.training.CheckpointMetadata", "v1.training.RootMetadata"),
    *("logging.RestoreStepStatistics", "logging.SaveStepStatistics"),
    *("metadata.ArrayMetadata", "metadata.NamedShardingMetadata", "metadata.ScalarMetadata"),
    *("metadata.StorageMetadata", "metadata.value.Compression", "metadata.ValueMetadataEntry"),
    *("v1.serialization.DeserializationContext", "v1.serialization.DeserializationParam"),
    *("v1.serialization.SerializationContext", "type_handlers.ParamInfo", "SaveArgs"),
    "type_handlers.SerializedArrayMetadata",
}
"""What holds values and does nothing: an attribute is what was given."""

# What hands its options on to another, or is a handler's own arguments.
SIBLINGS = {
    "BasePyTreeCheckpointHandler": ("PyTreeCheckpointHandler",),
    "StandardCheckpointHandler": ("PyTreeCheckpointHandler", "CheckpointManagerOptions"),
    "PyTreeCheckpointer": ("PyTreeCheckpointHandler",),
    "StandardCheckpointer": ("AsyncCheckpointer", "Checkpointer"),
    "AsyncCheckpointer": ("Checkpointer", "CheckpointManagerOptions"),
    "CompositeOptions": ("CheckpointManagerOptions", "Checkpointer", "AsyncCheckpointer"),
    "CompositeCheckpointHandler": ("CheckpointManager",),
    "JsonCheckpointHandler": ("CheckpointManagerOptions",),
    "ProtoCheckpointHandler": ("CheckpointManagerOptions",),
    "args.StandardSave": ("args.PyTreeSave",),
    "checkpoint_utils.checkpoints_iterator": ("wait_for_new_checkpoint",),
    "type_handlers.ScalarHandler": ("NumpyHandler",),
    "type_handlers.SingleReplicaArrayRestoreArgs": ("ArrayRestoreArgs",),
    "v1.delete_async": ("delete",),
    "v1.save_async": ("save",),
    "v1.save_checkpointables": ("save",),
    "v1.save_checkpointables_async": ("save",),
    "v1.metadata": ("load",),
    "v1.training.Checkpointer.save_checkpointables": ("save",),
    "v1.training.Checkpointer.save_async": ("save",),
    "v1.training.Checkpointer.save_checkpointables_async": ("save",),
    "v1.training.Checkpointer.delete_async": ("delete",),
    "utils.sync_global_devices": ("sync_global_processes",),
}

ELSEWHERE = {
    "type_handlers.SingleReplicaArrayHandler": {"primary_replica_id"},  # in tests/processes
    "v1.handlers.JsonHandler": {"filename"},  # these three in v1/test_context_options.py
    "v1.handlers.ProtoHandler": {"filename"},
    "v1.handlers.PyTreeHandler": {"context"},
    "options.MultiprocessingOptions": {"barrier_sync_key_prefix"},  # tests/handlers/coordinators
    "checkpoint_manager.CheckpointInfo": {"path", "is_readable"},  # penstock's own, for its managers
    "future.PipelineFuture": {"keep"},  # penstock's own, for its handlers
    # In tests/programs, by paxml's own tests: it makes a directory for one process as for several.
    "test_utils.create_tmp_directory": {"primary_host", "active_processes", "barrier_sync_key_prefix"},
    "pathways.register_type_handlers": {"use_single_replica_array_handler"},  # it refuses whatever is given
}
"""What is shown where this test does not look, or needs nothing that shows it."""


def options() -> Iterator[tuple[str, str, int]]:
    """Yield what has the option, by its shortest name, the option, and its place."""
    found: dict[int, tuple[Any, list[str]]] = {}
    seen: set[str] = set()
    for module, prefix in ((penstock.orbax, ""), (penstock.orbax.v1, "v1.")):
        _collect(module, prefix, found, seen)

    for value, names in found.values():
        if inspect.isclass(value) and issubclass(value, enum.Enum | BaseException):
            continue  # an error is made by who raises it

        name = min(names, key=len)
        methods = vars(value).items() if inspect.isclass(value) else ()
        parts = [(name, value)]
        parts += [(f"{name}.{key}", one) for key, one in methods if key[0] != "_" and inspect.isfunction(one)]
        for callable_name, one in parts:
            yield from ((callable_name, *found) for found in _with_defaults(one))


def _collect(
    module: ModuleType, prefix: str, found: dict[int, tuple[Any, list[str]]], seen: set[str]
) -> None:
    if module.__name__ in seen:
        return

    seen.add(module.__name__)
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if isinstance(value, ModuleType) and value.__name__.startswith("penstock.orbax"):
            _collect(value, f"{prefix}{name}.", found, seen)
        elif callable(value) and str(getattr(value, "__module__", "")).startswith("penstock"):
            found.setdefault(id(value), (value, []))[1].append(prefix + name)


def _with_defaults(function: Any) -> Iterator[tuple[str, int]]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return

    named = [one for one in parameters if one.name != "self"]
    for place, parameter in enumerate(named):
        if parameter.default is not parameter.empty:
            yield parameter.name, place


@cache
def used() -> dict[tuple[str, str | int], set[str]]:
    """Which tests call a function or class of a name with an option, by its name or its place."""
    found: dict[tuple[str, str | int], set[str]] = defaultdict(set)
    for path in [path for room in ROOMS for path in (TESTS / room).rglob("*.py")]:
        tree = ast.parse(path.read_text())
        passed_on = _passed_on(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                _note(node, passed_on, path.name, found)
            elif isinstance(node, ast.Dict):  # options that a test is parametrised with
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                for called in passed_on.get("", ()):
                    for key in keys:
                        found[called, str(key)].add(path.name)

    return found


def _note(call: ast.Call, passed_on: dict[str, set[str]], file: str, found: Any) -> None:
    called = _called(call)
    for keyword in call.keywords:
        if keyword.arg is not None:
            for name in {called, *passed_on.get(called, ())}:
                found[name, keyword.arg].add(file)
            if called == "setattr":
                continue
    for place, _ in enumerate(call.args):
        found[called, place].add(file)


def _passed_on(tree: ast.AST) -> dict[str, set[str]]:
    """What each helper of a file calls with `**options`; under "" what anything in it calls so."""
    found: dict[str, set[str]] = defaultdict(set)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and any(keyword.arg is None for keyword in call.keywords):
                    found[function.name].add(_called(call))
                    found[""].add(_called(call))

    for _ in range(3):  # helpers that call helpers
        for called in found.values():
            called |= {deeper for name in tuple(called) for deeper in found.get(name, ())}

    return found


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr

    return function.id if isinstance(function, ast.Name) else ""


@cache
def assigned() -> set[str]:
    """Attributes that tests set, as `context.memory.read_concurrent_bytes = ...` does."""
    found: set[str] = set()
    for path in [path for room in ROOMS for path in (TESTS / room).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else ()
            found |= {target.attr for target in targets if isinstance(target, ast.Attribute)}

    return found


def shown_by_cases() -> set[str]:
    files = (
        *(test_options_of_handlers, test_options_of_checkpointers),
        *(test_options_of_functions, test_options_of_managers),
    )
    return {parameter for file in files for parameter in file.CASES.parameters()}


def is_shown(name: str, option: str, place: int) -> bool:
    if name in RECORDS or f"{name}.{option}" in shown_by_cases():
        return True
    if name.startswith("v1.options.") and option in assigned():
        return True

    short = name.rpartition(".")[2]
    return bool(
        used().get((short, option))
        or used().get((short, place))
        or any(is_shown_as(sibling, option) for sibling in SIBLINGS.get(name, ()))
    )


def is_shown_as(sibling: str, option: str) -> bool:
    return f"{sibling}.{option}" in shown_by_cases() or bool(used().get((sibling.rpartition(".")[2], option)))


def test_each_option_is_shown_or_has_no_effect_by_the_page() -> None:
    unknown = [
        f"{name}.{option}"
        for name, option, place in options()
        if not is_shown(name, option, place)
        and option not in WITHOUT_EFFECT.get(name, {})
        and option not in ELSEWHERE.get(name, set())
    ]

    assert unknown == []


def test_the_page_says_what_has_no_effect() -> None:
    page = PAGE.read_text()

    parameters = [f"{name}.{one}" for name, ones in WITHOUT_EFFECT.items() for one in ones]
    assert [parameter for parameter in parameters if f"`{parameter}`" not in page] == []


def test_what_has_no_effect_exists() -> None:
    for name, ones in WITHOUT_EFFECT.items():
        assert set(ones) <= set(inspect.signature(found_at(name)).parameters), name


def test_docstrings_say_what_has_no_effect() -> None:
    said: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        said |= set(re.findall(r"(?m)^ +(\w+): (?:[^:]*\n? +)?Has no effect", path.read_text()))

    of_classes_without_a_public_name = {"verbose"}
    assert said - of_classes_without_a_public_name == {
        one for ones in WITHOUT_EFFECT.values() for one in ones
    }


def found_at(name: str) -> Any:
    return pkgutil.resolve_name(f"penstock.orbax.{name}")


def test_records_hold_what_they_are_given() -> None:
    for name in sorted(RECORDS):
        record = found_at(name)
        if dataclasses.is_dataclass(record):
            make: Any = record
            names = [field.name for field in dataclasses.fields(record) if field.init]
            values = {key: object() for key in names}
            if name in WITH_TYPES:
                values = {key: value for key, value in values.items() if key not in WITH_TYPES[name]}
            made = make(**values)
            assert all(getattr(made, key) is value for key, value in values.items()), name


WITH_TYPES = {"SaveArgs": {"aggregate"}, "metadata.NamedShardingMetadata": {"axis_types"}}
"""What looks at a value when it is given."""
