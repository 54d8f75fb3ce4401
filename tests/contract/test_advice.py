"""What errors advise works: lines that they show are run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import penstock
from penstock.errors import NoHandlerError, StructureMismatchError

STATE: dict[str, Any] = {
    "model": {"head": np.ones((4, 3), np.float32), "body": np.ones(5, np.float32)},
    "old.name": 1,
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    penstock.sync.save(tmp_path / "c", STATE)
    return str(tmp_path / "c")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"model": {"head": np.zeros((4, 9), np.float32), "body": np.zeros(5, np.float32)}},
            ["rename", "on_missing"],
        ),
        ({"new": 5}, ["on_missing"]),
        ({"old.name": ...}, ["on_unexpected"]),
        ({"model": {"head": np.zeros((4, 3), np.float16), "body": np.zeros(5, np.float32)}}, ["dtype"]),
    ],
)
def test_the_line_that_a_mismatch_shows_accepts_it(
    path: str, changes: dict[str, Any], named: list[str]
) -> None:
    like = {name: value for name, value in {**STATE, **changes}.items() if value is not ...}
    with pytest.raises(StructureMismatchError) as raised:
        penstock.sync.restore(path, like=like)

    said = str(raised.value)
    (line,) = re.findall(r"accepted by: (restore\(.*\))", said)
    assert re.findall(r"(\w+)=", line)[1:] == named
    accepted = eval(line.replace("like=...", "like=like"), {"restore": penstock.sync.restore, "like": like})

    assert accepted.keys() == like.keys()
    if "rename" in named:
        assert accepted["model"]["head"].shape == (4, 9)
        assert "strict=False" in said


def test_printed_key_paths_can_be_pasted(path: str) -> None:
    leaf = penstock.sync.metadata(path).leaves[0]

    assert leaf.key_path == "['model']['body']"
    assert penstock.sync.restore(path, only="['model']")["model"].keys() == {"body", "head"}
    assert penstock.sync.restore(path, only=leaf.key_path).keys() == {"model"}
    assert penstock.sync.restore(path, only=["['old.name']"]) == {"old.name": 1}
    renamed = penstock.sync.restore(path, rename={"['model']['head']": "['heads'][0]", "['old.name']": None})
    assert renamed["heads"]["0"].shape == (4, 3)
    assert renamed.keys() == {"heads", "model"}
    half = penstock.sync.restore(path, dtype={"['model']['head']": "float16"})
    assert (half["model"]["head"].dtype, half["model"]["body"].dtype) == (np.float16, np.float32)


class Called:
    def __call__(self) -> None: ...


@pytest.mark.parametrize("function", [jnp.tanh, len, lambda: 1, jnp.add])
def test_a_function_in_the_tree_has_its_own_advice(tmp_path: Path, function: object) -> None:
    with pytest.raises(NoHandlerError, match=r"eqx\.filter") as raised:
        penstock.sync.save(tmp_path / "c", {"act": function, "w": jnp.ones(2)})

    assert raised.value.key_path == "['act']"
    with pytest.raises(NoHandlerError, match=r"registry\.register"):
        penstock.sync.save(tmp_path / "c", {"act": Called()})


def test_reprs_say_what_is_held(tmp_path: Path) -> None:
    with penstock.sync.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, {"a": np.ones(2)}, metrics={"loss": 0.5})
        manager.wait()
        about = manager.metadata(3)

    assert repr(about).startswith("<StepMetadata step 3 ")
    assert "default (1 leaf)" in repr(about)
    assert "metrics={'loss': 0.5}" in repr(about)
    assert "1 leaf, 16 bytes, committed 20" in repr(about.items["default"])
    assert str(penstock.Milestone.STAGED) == "staged"
