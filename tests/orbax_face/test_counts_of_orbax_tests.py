"""A test of Orbax counts for penstock if it enters a function of the face, in whatever thread."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.proofs.orbax_tests.__main__ import alone, page
from tests.proofs.orbax_tests.entered import Entered

import penstock.orbax as ocp


@pytest.fixture
def entered() -> Iterator[Entered]:
    assert ocp.CheckpointManagerOptions is not None  # what a test uses has been imported before it
    before = sys.getprofile(), threading.getprofile()
    noting = Entered()
    noting.start()
    yield noting
    threading.setprofile(before[1])
    sys.setprofile(before[0])


def test_a_function_that_is_called_is_noted(entered: Entered) -> None:
    ocp.utils.to_flat_dict({"a": 1})
    assert "tree.to_flat_dict" in entered.names
    entered.clear()
    assert not entered.names


def test_another_thread_counts_too(entered: Entered) -> None:
    thread = threading.Thread(target=ocp.utils.to_flat_dict, args=({"a": 1},))
    thread.start()
    thread.join()
    assert "tree.to_flat_dict" in entered.names


def test_a_data_class_alone_does_not_count(entered: Entered) -> None:
    options = ocp.options.MultiprocessingOptions(primary_host=0)
    manager = ocp.CheckpointManagerOptions(multiprocessing_options=options)
    assert manager.multiprocessing_options == options
    assert repr(options)
    assert isinstance(ocp.SaveArgs(), ocp.SaveArgs)
    assert not entered.names


def test_the_page_counts_tests_apart_that_enter_nothing(tmp_path: Path) -> None:
    def lines(*tests: dict[str, Any]) -> str:
        uses: dict[str, Any] = {"test": "", "status": "uses", "why": ["a"]}
        return "".join(json.dumps(line) + "\n" for line in (uses, *tests))

    (tmp_path / "ours").mkdir()
    results = tmp_path / "ours" / "a_test.jsonl"
    results.write_text(
        lines(
            {"test": "A.test_one", "status": "passed", "why": "", "entered": 3},
            {"test": "A.test_two", "status": "passed", "why": "", "entered": 0},
            {"test": "A.test_old", "status": "passed", "why": ""},
            {"test": "A.test_bad", "status": "failed", "why": "other", "entered": 0},
        )
    )

    assert alone(results) == {"A.test_two"}
    text = page(tmp_path / "theirs", tmp_path / "ours")
    assert "2 of 3 tests in scope pass" in text
    assert "* 1 more pass and enter no function of penstock" in text
    assert "| a_test | 2 | 1 | 0 | 1 |" in text
