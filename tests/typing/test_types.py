"""Both checkers know what a restore returns, and reject a misspelt keyword everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IGNORE = re.compile(r"  # type: ignore\[[\w, -]+\]$", re.MULTILINE)
COMMANDS = {"mypy": ["--no-error-summary"], "pyright": ["--pythonpath", sys.executable]}

pytestmark = pytest.mark.timeout(118)  # a checker reads all of jax and penstock; the run ends at 120 s


@pytest.mark.parametrize("checker", COMMANDS)
def test_types_of_results_are_known_and_misspelt_keywords_are_rejected(checker: str, tmp_path: Path) -> None:
    path = shutil.which(checker, path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip(f"{checker} is not installed")

    text = (HERE / "rejected.py").read_text()
    expected = {at for at, line in enumerate(text.splitlines(), 1) if IGNORE.search(line)}
    bare = tmp_path / "bare.py"
    bare.write_text(IGNORE.sub("", text))
    run = subprocess.run(
        [path, *COMMANDS[checker], str(HERE / "revealed.py"), str(bare)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )

    found = re.findall(r"(\w+\.py):(\d+):(?:\d+ -)? error", run.stdout)
    assert len(expected) > 25
    assert {(name, int(line)) for name, line in found} == {("bare.py", line) for line in expected}, run.stdout
