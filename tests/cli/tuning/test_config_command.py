from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "penstock.toml"
    path.write_text("[memory]\nlimit_bytes = '2GiB'\n[profiles.big.save.write]\nconcurrency = 9\n")
    return path


def test_what_is_given_is_shown_with_its_source(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--given", "--profile", "big"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert f'memory.limit_bytes\t"2GiB"\t{file}' in lines
    assert f"save.write.concurrency\t9\t{file}" in lines
    assert not any(line.endswith("default") for line in lines)

    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"key": "store.io", "value": '"auto"', "source": "default"} in shown


def test_a_right_file_is_right_with_every_profile(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{file}: right", f"{file}, profile big: right"]


def test_a_file_is_named_with_and_without_an_option(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("[memory]\nlimmit_bytes = 1\n")
    assert main(["config", "check", str(tmp_path / "other.toml")]) == 1
    assert main(["config", "check", "--config", str(tmp_path / "other.toml")]) == 1


def test_wrong_options_of_files_profiles_and_stages_are_found(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("[profiles.a.save.write]\nconcurency = 1\n[profiles.b.save]\nstages = ['flat']\n")

    assert main(["config", "check"]) == 1
    right, a, b = capsys.readouterr().out.splitlines()
    assert right == f"{file}: right"
    assert "profile a: profiles.a.save.write.concurency: no such option; did you mean" in a
    assert "profile b: no stage is called 'flat'; did you mean 'flatten'" in b

    assert main(["config", "check", "--json"]) == 1
    checked = json.loads(capsys.readouterr().out)
    assert [each["profile"] for each in checked["checked"] if each["problem"]] == ["a", "b"]


def test_a_missing_file_of_options_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--config", "/absent.toml"]) == 1
    assert "cannot read '/absent.toml'" in capsys.readouterr().err


def test_the_reference_is_printed_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "save.write"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t")[:4] == ["save.write.concurrency", "whole number", "", "4"]
    assert len(lines) == 2

    assert main(["config", "reference", "--json"]) == 0
    assert {entry["key"] for entry in json.loads(capsys.readouterr().out)} > {"save.write.concurrency"}
    assert main(["config", "reference", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "penstock.toml"
    assert main(["config", "reference", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Configuration\n")


@pytest.mark.process
def test_showing_loads_no_array_library() -> None:
    program = """
import sys
from penstock.cli import main
main(["config", "show"])
print([name for name in ("jax", "numpy", "tensorstore") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]"
