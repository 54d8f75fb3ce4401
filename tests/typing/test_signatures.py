"""`help` and `inspect.signature` show every keyword, and the interpreter refuses one that is misspelt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any

import anyio
import pytest

import penstock
from penstock.checkpointer.parts import RestoreKeywords, RestoreOnceKeywords
from penstock.kernel.messages import RestoreOptions

BARE: Any = penstock  # without its types
ASYNC: tuple[Any, ...] = (
    penstock.Checkpointer,
    penstock.CheckpointManager,
    penstock.convert,
    penstock.export_safetensors,
    penstock.metadata,
    penstock.repair,
    penstock.restore,
    penstock.restore_items,
    penstock.save,
    penstock.seal,
    penstock.verify,
    penstock.watch,
)
BLOCKING: tuple[Any, ...] = tuple(getattr(penstock.sync, each.__name__) for each in ASYNC)
ONLY_BLOCKING = {"Checkpointer.close"}
"""For the cells of a notebook, which use a Checkpointer without a `with`."""


def functions(of: tuple[Any, ...]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function, every class and every public method, by name."""
    for each in of:
        yield each.__name__, each
        if isinstance(each, type):
            for name, value in vars(each).items():
                if not name.startswith("_") and callable(value):
                    yield f"{each.__name__}.{name}", value


def parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return {each.name: (each.kind, each.default) for each in found}


@pytest.mark.parametrize(("name", "function"), [*functions(ASYNC), *functions(BLOCKING)])
def test_every_parameter_has_a_name(name: str, function: Callable[..., Any]) -> None:
    kinds = {kind for kind, _ in parameters(function).values()}

    assert not kinds & {Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL}


TWINS = [
    each for each in functions(BLOCKING) if each[0] != "Checkpointer.close"
]  # for notebooks, which have no `with`


@pytest.mark.parametrize(("name", "function"), TWINS)
def test_a_blocking_twin_shows_what_its_original_takes(name: str, function: Callable[..., Any]) -> None:
    originals = dict(functions(ASYNC))
    assert (name in originals) is (name not in ONLY_BLOCKING)
    if name in originals:
        assert parameters(function) == parameters(originals[name])
    if not isinstance(function, type):
        assert not inspect.iscoroutinefunction(function)


@pytest.mark.parametrize(
    ("restore", "keywords"),
    [
        (penstock.restore, RestoreOnceKeywords),
        (penstock.Checkpointer.restore, RestoreKeywords),
        (penstock.CheckpointManager.restore, RestoreKeywords),
    ],
)
def test_the_overloads_of_restore_name_what_restore_takes(
    restore: Callable[..., Any], keywords: type[RestoreKeywords]
) -> None:
    shown = set(parameters(restore)) - {"self", "path", "step", "like", "as_type"}

    assert shown == set(keywords.__annotations__)
    assert set(RestoreOptions.__dataclass_fields__) <= shown


def test_defaults_are_the_same_in_every_layer() -> None:
    saves = [penstock.save, penstock.Checkpointer.save, penstock.CheckpointManager.save]
    restores = [penstock.restore, penstock.Checkpointer.restore, penstock.CheckpointManager.restore]
    makers: list[Any] = [penstock.Checkpointer, penstock.CheckpointManager]
    layers: list[list[Any]] = [saves, restores, makers]
    for layer in layers:
        shown = [parameters(function) for function in layer]
        for name, parameter in shown[0].items():
            if name == "observers":  # of all that open a Checkpointer
                every = [parameters(function) for function in (*saves, *restores, *makers)]
                assert {other.get(name, parameter) for other in every} == {parameter}
            elif name not in {"path", "tree"}:
                assert all(other[name] == parameter for other in shown), name


@pytest.mark.parametrize(
    "call",
    [
        lambda path: BARE.sync.restore(path, lik=1),
        lambda path: BARE.sync.save(path, 1, lik=1),
        lambda path: BARE.sync.convert(path, path, lik=1),
        lambda path: BARE.sync.Checkpointer(lik=1),
        lambda path: BARE.sync.CheckpointManager(path, lik=1),
        lambda path: BARE.Checkpointer(lik=1),
        lambda path: BARE.CheckpointManager(path, lik=1),
        lambda path: BARE.watch(path, lik=1),
        lambda path: anyio.run(partial(BARE.restore, path, lik=1)),
        lambda path: anyio.run(partial(BARE.save, path, 1, lik=1)),
    ],
)
def test_a_misspelt_keyword_is_pythons_own_error(call: Callable[[Any], object], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'lik'"):
        call(tmp_path / "x")


@pytest.mark.parametrize(("name", "function"), [*functions(ASYNC)])
def test_what_is_awaited_is_a_coroutine_function(name: str, function: Callable[..., Any]) -> None:
    """Libraries that try a call again, and servers that run one, ask for that."""
    assert inspect.iscoroutinefunction(function) == inspect.iscoroutinefunction(inspect.unwrap(function))
    assert name != "save" or inspect.iscoroutinefunction(function)
