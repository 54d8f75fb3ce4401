"""The page for somebody moving over says what works: its snippets are run in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "move-from-orbax.md"


def test_the_snippets_of_the_page_run(tmp_path: Path) -> None:
    names: dict[str, Any] = {"path": tmp_path / "one", "other_path": tmp_path / "two"}
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 4
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), names)  # the page is ours

    for found in (names["restored"], names["same"], names["best"]):
        structures: Any = [jax.tree.structure(found), jax.tree.structure(names["tree"])]
        assert structures[0] == structures[1]
        assert found["step"] == 7
