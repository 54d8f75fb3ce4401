"""What cannot be done fails with the same kind of error as in Orbax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as _orbax_v1
import pytest

import penstock.orbax.v1 as penstock_v1
from penstock import PenstockError

orbax_v1: Any = _orbax_v1  # it has no types

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MISTAKES: dict[str, Callable[[Any, Path], object]] = {
    "nothing there": lambda ocp, path: ocp.load(path / "none"),
    "an item": lambda ocp, path: ocp.load(path / "saved" / "state"),
    "a directory of checkpoints": lambda ocp, path: ocp.load(path),
    "no such item": lambda ocp, path: ocp.load(path / "saved", checkpointable_name="none"),
    "no tree": lambda ocp, path: ocp.load(path / "saved", checkpointable_name=None),
    "no name": lambda ocp, path: ocp.load(path / "saved", checkpointable_name=""),
    "a reserved name": lambda ocp, path: ocp.load(path / "saved", checkpointable_name="metrics"),
    "a file": lambda ocp, path: ocp.load(path / "saved" / "_CHECKPOINT_METADATA"),
    "interrupted": lambda ocp, path: ocp.load(path / "x.orbax-checkpoint-tmp"),
    "items: nothing there": lambda ocp, path: ocp.load_checkpointables(path / "none"),
    "items: no such": lambda ocp, path: ocp.load_checkpointables(path / "saved", {"none": None}),
    "items: no dict": lambda ocp, path: ocp.load_checkpointables(path / "saved", ["state"]),
    "items: a reserved name": lambda ocp, path: ocp.load_checkpointables(path / "saved", {"AUTO": None}),
    "items: no fit": lambda ocp, path: ocp.load_checkpointables(path / "saved", {"state": {"b": 1}}),
    "metadata: nothing there": lambda ocp, path: ocp.metadata(path / "none"),
    "metadata: no such item": lambda ocp, path: ocp.metadata(path / "saved", "none"),
    "metadata: items of nothing": lambda ocp, path: ocp.checkpointables_metadata(path / "none"),
    "another structure": lambda ocp, path: ocp.load(path / "saved", {"b": 1}),
    "another shape": lambda ocp, path: ocp.load(path / "saved", {"a": jnp.zeros(3), "s": "", "n": 0}),
    "no scalar": lambda ocp, path: ocp.load(path / "saved", {"a": int, "s": "", "n": 0}),
    "no abstract leaf": lambda ocp, path: ocp.load(path / "saved", {"a": object(), "s": "", "n": 0}),
    "save: there is one": lambda ocp, path: ocp.save(path / "saved", {"a": 1}),
    "save: an empty tree": lambda ocp, path: ocp.save(path / "new", {}),
    "save: nothing": lambda ocp, path: ocp.save(path / "new", None),
    "save: no leaf": lambda ocp, path: ocp.save(path / "new", {"a": object()}),
    "save: a complex number": lambda ocp, path: ocp.save(path / "new", {"a": 2j}),
    "save: no elements": lambda ocp, path: ocp.save(path / "new", {"a": np.ones((0,))}),
    "save: bytes": lambda ocp, path: ocp.save(path / "new", {"a": b"abc"}),
    "save: no items": lambda ocp, path: ocp.save_checkpointables(path / "new", {}),
    "save: no dict": lambda ocp, path: ocp.save_checkpointables(path / "new", "state"),
    "save: no name": lambda ocp, path: ocp.save_checkpointables(path / "new", {"": {"a": 1}}),
    "save: a reserved name": lambda ocp, path: ocp.save_checkpointables(path / "new", {"AUTO": {"a": 1}}),
    "save: nobody handles it": lambda ocp, path: ocp.save_checkpointables(path / "new", {"a": object()}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_kind_of_error_is_that_of_orbax(mistake: str, tmp_path: Path) -> None:
    orbax_v1.save(tmp_path / "saved", {"a": jnp.arange(4.0), "s": "x", "n": 1})
    (tmp_path / "x.orbax-checkpoint-tmp").mkdir()
    raised: list[BaseException] = []
    for library in (orbax_v1, penstock_v1):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the question
            MISTAKES[mistake](library, tmp_path)

        raised.append(caught.value)

    theirs, ours = raised
    kinds = {kind.__name__ for kind in type(ours).__mro__}
    built_in = next(kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins")
    assert isinstance(ours, built_in), (type(ours), type(theirs))
    if type(theirs).__module__ != "builtins":
        assert type(theirs).__name__ in kinds
    assert not (tmp_path / "new").exists()


def test_what_orbax_drops_in_silence_is_loaded(tmp_path: Path) -> None:
    tree = {"a": jnp.arange(4.0), "b": 1}
    orbax_v1.save(tmp_path / "saved", tree)

    # None asks for what was saved. Orbax says so too, and returns None.
    assert orbax_v1.load(tmp_path / "saved", {"a": None, "b": int})["a"] is None
    loaded = penstock_v1.load(tmp_path / "saved", {"a": None, "b": None})
    np.testing.assert_array_equal(loaded["a"], tree["a"])
    assert loaded["b"] == 1

    strict = penstock_v1.Context()
    strict.pytree.loading.partial_load, strict.pytree.loading.on_missing = True, "raise"
    with strict, pytest.raises(ValueError, match=r"\['c'\]: requested, but not in the checkpoint"):
        penstock_v1.load(tmp_path / "saved", {"a": None, "c": 5})


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    assert orbax_v1.is_orbax_checkpoint(tmp_path)
    assert not penstock_v1.is_orbax_checkpoint(tmp_path)


def test_what_penstock_raises_is_a_penstock_error(tmp_path: Path) -> None:
    penstock_v1.save(tmp_path / "a", {"a": 1})
    for mistake in (
        lambda: penstock_v1.save(tmp_path / "a", {"a": 1}),
        lambda: penstock_v1.load(tmp_path / "none"),
        lambda: penstock_v1.save_checkpointables(tmp_path / "b", {"a": object()}),
    ):
        with pytest.raises(PenstockError):
            mistake()
