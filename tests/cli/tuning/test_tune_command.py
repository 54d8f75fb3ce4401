from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.object_server import CREDENTIALS, InMemory, object_server

import penstock
from penstock.cli import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    return tmp_path


def test_a_profile_is_written_beside_what_the_file_has(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penstock.sync.save(place / "step", {"w": np.zeros(1000, np.float32)})
    file = place / "penstock.toml"
    file.write_text("[store]\nlinks = 'any'")

    # No time for a candidate: what is measured depends on the machine, and tests/tuning has the choice.
    arguments = [
        "tune",
        "store",
        "--like",
        "step",
        "--time",
        "0s",
        "--picture",
        "figures.svg",
        "--profile",
        "pod",
    ]
    assert main(arguments) == 0

    said = capsys.readouterr().out
    assert "PENSTOCK_PROFILE=pod" in said
    assert "There was no time for all that was worth a try." in file.read_text()
    assert penstock.Config.load(file, profile="pod", environ={}).store.links == "any"
    assert (place / "figures.svg").read_text().startswith("<svg")
    assert os.listdir(place / "store") == []

    assert main(arguments) == 1
    assert "has a profile 'pod' already" in capsys.readouterr().err


def test_candidates_are_measured_by_real_saves_and_restores(place: Path) -> None:
    assert main(["tune", "store", "--size", "100KiB", "--try", "restore.read.concurrency=1"]) == 0

    text = (place / "penstock.toml").read_text()
    assert "# restore, restore.read.concurrency = 1: " in text
    assert "save.write" not in text
    for line in (
        "One file of 100.0 KiB through the page cache: durable after ",
        "# 4 KiB are durable after ",
    ):
        assert line in text
    assert penstock.Config.load(profile="tuned", environ={}) is not None
    assert os.listdir(place / "store") == []


def test_a_bucket_is_measured_as_a_directory_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore.store", reason="needs obstore")
    objects = InMemory()
    with object_server(objects) as server:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint}.items():
            monkeypatch.setenv(name, value)

        assert main(["tune", "s3://bucket/scratch", "--size", "100KiB", "--time", "0s"]) == 0

    text = (place / "penstock.toml").read_text()
    assert "There was no time for all that was worth a try." in text
    assert "# One object of 100.0 KiB: put in " in text
    assert list(objects.objects) == []


def test_what_is_set_already_is_what_candidates_are_compared_with(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "penstock.toml").write_text('[telemetry]\nobservers = ["absent"]\n')

    assert main(["tune", "store", "--size", "1KiB", "--time", "0s"]) == 1
    assert "there is no observer 'absent'" in capsys.readouterr().err
    assert os.listdir(place / "store") == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["absent"], "'absent' is no directory"),
        (["store", "--size", "much"], "--size: 'much' is not a number of bytes"),
        (["store", "--time", "soon"], "--time: 'soon' is not a number of seconds"),
        (["store", "--profile", "a]b"], "letters, digits"),
        (["store", "--like", "absent"], "absent"),
        (["store", "--try", "concurrency"], "--try: 'concurrency' is not of the form"),
        (["store", "--try", "store.io=quick"], "store.io"),
        (["store", "--try", "store.speed=9"], "store.speed"),
    ],
)
def test_wrong_arguments_of_tune_are_errors(
    place: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == 1
    assert problem in capsys.readouterr().err
    assert not (place / "penstock.toml").exists()
    assert os.listdir(place / "store") == []
