"""The commands of docs/howto/recover-a-damaged-checkpoint.md print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax import survey_item

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "recover-a-damaged-checkpoint.md"
DATA_FILE = re.compile(r"d/[0-9a-f]{32}")


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def state(step: int) -> Any:
    """Of which the embedding is frozen."""
    return {
        "embedding": np.arange(50_000, dtype=np.float32),
        "layers": [np.full(1000, step, np.float32), np.full(1000, -step, np.float32)],
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three steps, of which the second one has two flipped bits."""
    monkeypatch.chdir(tmp_path)
    with penstock.sync.CheckpointManager("run") as manager:
        for step in (100, 200, 300):
            manager.save(step, state(step), metrics={"loss": 1 / step})

    for name in ("['embedding']", "['layers'][0]"):
        ranges = survey_item(LocalStore(), str(tmp_path / "run" / "200"), "default").ranges
        found = next(found for found in ranges if name in found.key_paths)
        data = bytearray(Path(found.file).read_bytes())
        data[found.checksum.offset] ^= 1
        Path(found.file).write_bytes(data)

    return tmp_path


def test_the_page_shows_what_the_commands_print(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # a table takes no more of them than there are
    (session,) = examples("console")
    shown: list[str] = []
    status = 0
    for line in session.splitlines():
        if not line.startswith("$ "):
            continue

        command = line.removeprefix("$ ")
        if command == "echo $?":
            said = f"{status}\n"
        else:
            status = main(["--table", *shlex.split(command)[1:]])  # as on a terminal
            said = capsys.readouterr().out
        shown.append(f"{line}\n{said.replace(f'{run}/', '')}")

    assert DATA_FILE.sub("d/", "".join(shown)) == DATA_FILE.sub("d/", session)


def test_the_python_of_the_page_runs(run: Path) -> None:
    names: dict[str, Any] = {"penstock": penstock, "state": state(0)}
    for example in examples("python"):
        exec(compile(example, PAGE.name, "exec"), names)

    restored, report = names["restored"], names["report"]
    assert [leaf.name for leaf in report.gone] == ["default ['layers'][0]"]
    assert restored["embedding"].tobytes() == state(200)["embedding"].tobytes()
    assert restored["layers"][0].tolist() == [0] * 1000
    assert restored["layers"][1].tolist() == [-200] * 1000
