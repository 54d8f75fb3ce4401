"""What a process has for itself, restored by one process: what it saved itself, and what several did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock.sync
from penstock import PerProcess
from penstock.errors import StructureMismatchError

OWN = {"rows": np.arange(5), "name": "x", "at": {"step": 7}}


def divide(values: Any, index: int, count: int) -> Any:
    return [int(row) for value in values for row in value["rows"]][index::count]


def not_called(values: Any, index: int, count: int) -> Any:
    raise AssertionError("as many processes restore as have saved")


def test_a_target_without_a_value_takes_what_was_saved_whatever_it_is(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "a", {"w": np.ones(2), "own": PerProcess(OWN)})

    like: dict[str, Any] = {"w": np.zeros(2), "own": PerProcess(None, not_called)}

    found = penstock.sync.restore(tmp_path / "a", like=like)

    assert found["own"].divide is not_called
    assert list(found["own"].value) == ["at", "name", "rows"]
    assert found["own"].value["rows"].tolist() == list(range(5))
    assert found["own"].value["at"] == {"step": 7}
    np.testing.assert_array_equal(found["w"], np.ones(2))


def test_none_that_was_saved_comes_back(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "a", {"own": PerProcess(None), "w": 1})

    found = penstock.sync.restore(tmp_path / "a", like={"own": PerProcess(None, not_called), "w": 0})

    assert found == {"own": PerProcess(None, not_called), "w": 1}


def test_a_target_without_a_value_or_a_function_is_of_another_structure(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "a", {"own": PerProcess(OWN)})

    with pytest.raises(StructureMismatchError):
        penstock.sync.restore(tmp_path / "a", like={"own": PerProcess(None)})


def test_the_values_of_several_processes_are_divided_anew(tmp_path: Path) -> None:
    saved = {f"process_{at}-of-3": {"rows": np.arange(at, 9, 3)} for at in range(3)}
    penstock.sync.save(tmp_path / "a", {"own": saved, "w": 1})

    like: dict[str, Any] = {"own": PerProcess(None, divide), "w": 0}

    found = penstock.sync.restore(tmp_path / "a", like=like)

    assert found["own"].value == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    assert found["w"] == 1
