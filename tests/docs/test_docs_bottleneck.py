"""What docs/howto/find-the-bottleneck.md shows is what one gets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.kernel.pipeline import advice_of
from penstock.reports.report import COLUMNS

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "find-the-bottleneck.md").read_text()
pytestmark = pytest.mark.anyio


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


async def run(code: str, names: dict[str, Any]) -> None:
    """Run an example of the page, which may await."""
    body = "".join(f"    {line}\n" for line in code.splitlines())
    exec(f"async def example():\n{body}    globals().update(locals())\n", names)
    await names["example"]()


async def test_the_examples_run_and_print_what_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    async with penstock.Checkpointer() as checkpointer:
        names: dict[str, Any] = {
            "checkpointer": checkpointer,
            "path": "step_100",
            "state": {"w": np.ones(1000)},
        }
        printed = []
        for code in examples("python"):
            await run(code, names)
            printed.append(capsys.readouterr().out)

    shown = examples("text")[0].splitlines()
    saved, restored, explained = (text.splitlines() for text in printed[:3])
    assert saved[2] == shown[2]
    assert [line.split()[0] for line in saved[3:10]] == [line.split()[0] for line in shown[3:10]]
    assert restored[0].startswith("restore of ")
    assert " ".join(saved[10:]) == explained[0]
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    assert (tmp_path / "trace.json").read_text().startswith('{"traceEvents"')
    assert advice_of(names["Quantise"]()).busy.startswith("Quantise fewer")


def test_every_column_is_described() -> None:
    assert [name for name in COLUMNS[2:] if f"| `{name}` |" not in PAGE] == []
