"""Every public name, with Orbax's parameters and defaults; what differs is in the table, with the reason."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import orbax.checkpoint.experimental.v1 as _orbax_v1
import pytest
from tests.orbax_face.v1.differences import DIFFERENCES

import penstock.orbax.v1 as penstock_v1

orbax_v1: Any = _orbax_v1  # it has no types

MODULES = (
    *("arrays", "errors", "handlers", "multihost", "options", "partial", "path", "path.step", "training"),
    *("training.errors", "training.preservation_policies", "training.save_decision_policies", "tree"),
)
TYPES = {
    "Leaf",
    "AbstractLeaf",
    "Scalar",
    "AbstractScalar",
    "DType",
    "Shape",
    "ArrayLike",
    "PathLike",
    "Path",
}
# Types that stand for anything: Orbax has empty classes for its documentation.
ANYTHING = {
    *("Checkpointable", "AbstractCheckpointable", "PyTree", "PyTreeOf", "PyTreeMetadata", "JsonType"),
    *("PyTreeKey", "PyTreeKeyPath"),
}


def public_names() -> Iterator[str]:
    for name in vars(orbax_v1):
        if not name.startswith("_") and name not in MODULES:
            yield name
    for module in MODULES:
        for name, value in vars(find(orbax_v1, module)).items():
            home = str(getattr(value, "__module__", ""))
            imported = module.endswith("policies") and not home.startswith("orbax")
            if not name.startswith("_") and not isinstance(value, ModuleType) and not imported:
                yield f"{module}.{name}"


def find(library: Any, name: str) -> Any:
    for part in name.split("."):
        library = getattr(library, part)

    return library


def parameters(function: Any) -> dict[str, tuple[Any, Any]]:
    return {
        name: (parameter.kind, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
    }


def same_default(mine: Any, other: Any) -> bool:
    """Equal, or the same member or object of either library's own class of one name."""
    if isinstance(other, enum.Enum):
        return isinstance(mine, enum.Enum) and mine.name == other.name
    if mine is other or (type(mine) is type(other) and mine == other):
        return True

    return type(mine).__name__ == type(other).__name__ and mine is not None


def difference(name: str, mine: Any, other: Any) -> str | None:
    if isinstance(other, type) and issubclass(other, enum.Enum):
        return None if [m.value for m in mine] == [m.value for m in other] else f"{name}: members"
    if not isinstance(other, type):
        return compare(name, mine, other)

    problems = [compare(name, mine, other)] if has_constructor(other) else []
    for method, value in vars(other).items():
        if method.startswith("_") or method == "v0" or not callable(value):
            continue
        if not hasattr(mine, method):
            problems.append(f"{name}.{method}: absent")
        elif isinstance(value, type):
            if f"{name}.{method}" not in DIFFERENCES:
                problems.append(difference(f"{name}.{method}", getattr(mine, method), value))
        else:
            problems.append(compare(f"{name}.{method}", getattr(mine, method), value))

    return "; ".join(problem for problem in problems if problem) or None


def has_constructor(class_: type) -> bool:
    """Whether it has a signature of its own: what typing gives protocols changes when one is made."""
    makers = [
        vars(base)["__init__"]
        for base in class_.__mro__
        if "__init__" in vars(base) and not getattr(base, "_is_protocol", False)
    ]
    return not issubclass(class_, Exception) and any(made is not object.__init__ for made in makers)


def compare(name: str, mine: Any, other: Any) -> str | None:
    try:
        wanted = parameters(other)
    except (TypeError, ValueError):
        return None

    found = parameters(mine)
    if list(found) != list(wanted):
        return f"{name}: {list(found)}, not {list(wanted)}"
    for parameter, (kind, default) in wanted.items():
        if found[parameter][0] != kind:
            return f"{name}: {parameter} is {found[parameter][0].description}"
        if not same_default(found[parameter][1], default):
            return f"{name}: {parameter} is {found[parameter][1]!r} and not {default!r}"

    return None


@pytest.mark.parametrize("name", sorted(public_names()))
def test_a_public_name_is_that_of_orbax(name: str) -> None:
    mine, other = find(penstock_v1, name), find(orbax_v1, name)
    if name.rpartition(".")[2] in ANYTHING | TYPES:
        return

    found = difference(name, mine, other)
    if name not in DIFFERENCES:
        assert found is None


def test_all_says_what_there_is() -> None:
    for module in (penstock_v1, *[find(penstock_v1, name) for name in MODULES], penstock_v1.serialization):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert hasattr(module, name)


def test_the_table_names_what_there_is() -> None:
    for name in DIFFERENCES:
        plain = name.partition("(")[0]
        assert find(orbax_v1, plain.partition(".__init__")[0]) is not None if "Options" not in plain else True
