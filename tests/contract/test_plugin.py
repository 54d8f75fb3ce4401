"""The example plug-in: found by its entry points, proven by its own tests, and installed by pip for that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "docs" / "examples" / "plugin"
PROGRAM = """
import penstock, sys
from penstock_example import Vocabulary
folder, config = sys.argv[1:]
with penstock.sync.Checkpointer(config=config) as checkpointer:
    checkpointer.save(folder, {"words": Vocabulary(["a", "b"])}).result()
    print(checkpointer.restore(folder))
"""
CONFIG = """
[save]
stages = ["flatten", "prioritise", "device_to_host", "tally", "limit_bytes", "write", "commit", "finalize"]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it is installed in; this environment is left alone. pip fetches the build backend."""
    source, target = tmp_path_factory.mktemp("plugin") / "source", tmp_path_factory.mktemp("target")
    shutil.copytree(PLUGIN, source)
    options = ["--quiet", "--no-deps", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return target


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": os.path.abspath("src") + os.pathsep + path}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def laid_out(tmp_path: Path) -> Path:
    """A folder with what pip makes of it, in a tenth of the time."""
    target = tmp_path / "target"
    shutil.copytree(PLUGIN / "src", target)
    groups = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"]
    found = ConfigParser(delimiters="=")
    found.read_dict(groups)
    about = target / "penstock_example-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-example\nVersion: 1.0\n")
    with (about / "entry_points.txt").open("w") as file:
        found.write(file)

    return target


@pytest.mark.process
@pytest.mark.parametrize("how", ["laid_out", pytest.param("installed", marks=pytest.mark.slow)])
def test_entry_points_of_a_plugin_are_found(how: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    installed: Path = request.getfixturevalue(how)
    (tmp_path / "config.toml").write_text(CONFIG)
    done = run(installed, "-c", PROGRAM, str(tmp_path / "a"), str(tmp_path / "config.toml"))

    assert done.stderr == ""
    assert done.stdout == "{'words': Vocabulary(words=['a', 'b'])}\n"
    assert (tmp_path / "a" / "words.vocabulary.json").is_file()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(115)
def test_the_conformance_tests_of_a_plugin_pass(installed: Path, tmp_path: Path) -> None:
    shutil.copy(PLUGIN / "test_plugin.py", tmp_path)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={tmp_path}"]
    done = run(installed, "-m", "pytest", *options, str(tmp_path / "test_plugin.py"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 passed" in done.stdout
    lines = [line for line in (PLUGIN / "test_plugin.py").read_text().split("\n") if line.strip()]
    assert len(lines) <= 20
