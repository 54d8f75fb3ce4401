"""`ls`, `show` and `du` on roots, steps, items and safetensors."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli.conftest import Said, Stored

import penstock

Call = Callable[..., Said]
SOURCE = Path(__file__).parents[2] / "src"


def test_ls_tells_the_steps_and_what_is_wrong_with_them(kept: Stored, call: Call) -> None:
    said = call("ls", kept.run, "--best", "loss")

    assert said.status == 0
    assert [row[:2] for row in said.rows] == [
        ["0", "damaged"],
        ["1", "finished"],
        ["2", "finished"],
        ["4.orbax-checkpoint-tmp", "interrupted"],
    ]
    assert [row[5] for row in said.rows] == ["", "", "best", ""]
    assert said.rows[2][6] == '{"loss": 0.25}'
    assert said.rows[3][2] == "100"


def test_ls_as_a_document_has_the_same(kept: Stored, call: Call) -> None:
    document = call("ls", kept.run, "--json").document

    assert document["kind"] == "root"
    by_name = {step["name"]: step for step in document["steps"]}
    assert by_name["2"]["metrics"] == {"loss": 0.25}
    assert by_name["2"]["committed_at"].startswith("20")
    assert "item_handlers" in by_name["0"]["problem"] or "differs" in by_name["0"]["problem"]
    on_disk = sum(file.stat().st_size for file in (kept.run / "2").rglob("*") if file.is_file())
    assert by_name["2"]["nbytes"] == on_disk


def test_ls_counts_linked_files_as_shared(tmp_path: Path, call: Call) -> None:
    (tmp_path / "run" / "5").mkdir(parents=True)
    (tmp_path / "other").write_bytes(bytes(70))
    os.link(tmp_path / "other", tmp_path / "run" / "5" / "d")
    (tmp_path / "run" / "5" / "_METADATA").write_text("{}")

    (step,) = call("ls", tmp_path / "run", "--json").document["steps"]

    assert (step["own_bytes"], step["shared_bytes"], step["nbytes"]) == (2, 70, 72)


def test_ls_of_a_folder_lists_what_is_below_it(kept: Stored, call: Call) -> None:
    names = {row[0] for row in call("ls", kept.folder).rows}

    # A safetensors file in a folder makes that one checkpoint, beside those that are below it.
    assert names == {"run/0", "run/1", "run/2", "items", kept.folder.name, "shards"}


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("command", ["ls", "show", "du"])
def test_every_kind_of_path_can_be_looked_at(kept: Stored, call: Call, command: str, at: int) -> None:
    said = call(command, kept.each()[at])

    assert (said.status, said.err) == (0, "")
    assert said.rows
    assert call(command, kept.each()[at], "--json").document["path"]


def test_show_lists_every_leaf_of_every_item(kept: Stored, call: Call) -> None:
    rows = {(row[0], row[1]): row[2:] for row in call("show", kept.items).rows}

    assert rows["state", "['w']"] == ["np.ndarray", "4x3", "float32", "", "48", "48", ""]
    assert rows["about", "['a'][1]"][0] == "string"
    assert {item for item, _ in rows} == {"state", "about"}


def test_show_takes_a_step_an_item_and_patterns(kept: Stored, call: Call) -> None:
    def leaves(*more: str) -> list[str]:
        return [row[1] for row in call("show", kept.run, "--item", "default", *more).rows]

    assert leaves("--only", "params.*") == ["['params']['b.c']", "['params']['w']"]
    assert leaves("--only", "['params']") == ["['params']['b.c']", "['params']['w']"]
    assert leaves("--only", "['params']['b.c']") == ["['params']['b.c']"]
    assert call("show", kept.run, "--step", "1", "--json").document["path"].endswith("/run/1")
    assert call("show", kept.run, "--step", "0").status == 1  # it is damaged


def test_du_adds_up_and_tells_what_else_is_there(stored: Stored, call: Call) -> None:
    (stored.items / "notes.bin").write_bytes(bytes(1000))  # of another program

    document = call("du", stored.items, "--json").document
    by_path = {(layer["item"], layer["key_path"]): layer for layer in document["layers"]}

    assert by_path["state", ""]["stored_nbytes"] == 48 + 16
    assert by_path["state", "['w']"]["nbytes"] == 48
    assert document["other_bytes"] > 1000
    on_disk = sum(file.stat().st_size for file in stored.items.rglob("*") if file.is_file())
    assert document["on_medium_bytes"] == on_disk
    assert [row[3] for row in call("du", stored.items, "--depth", "0").rows[:2]] == ["about", "state"]


def test_du_draws_a_treemap_that_holds_no_script(kept: Stored, tmp_path: Path, call: Call) -> None:
    picture = tmp_path / "tree.svg"

    assert call("du", kept.step, "--picture", picture).status == 0

    drawn = ET.parse(picture).getroot()
    tags = {element.tag.rpartition("}")[2] for element in drawn.iter()}
    assert tags == {"svg", "g", "title", "rect", "text"}
    areas = [
        float(rect.get("width") or 0) * float(rect.get("height") or 0)
        for group in drawn
        if any("['w']" in (title.text or "") for title in group)
        for rect in group
        if rect.tag.endswith("rect")
    ]
    assert len(areas) == 1
    assert areas[0] > 0.3 * 960 * 540  # 48 of some 100 bytes


@pytest.mark.parametrize("command", ["ls", "show", "du"])
def test_names_from_a_checkpoint_cannot_control_a_terminal(kept: Stored, call: Call, command: str) -> None:
    for more in ((), ("--json",)):
        said = call(command, kept.step, *more)

        assert said.out.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize("path", ["", "nothing"])
def test_what_is_no_checkpoint_fails_in_one_line(path: str, tmp_path: Path, call: Call) -> None:
    said = call("show", tmp_path / path)

    assert (said.status, said.out) == (1, "")
    assert said.err.startswith("penstock: ")
    assert str(tmp_path) in said.err
    assert len(said.err.splitlines()) == 1


def test_ls_of_a_missing_step_fails_in_one_line(kept: Stored, call: Call) -> None:
    said = call("show", kept.run, "--step", "9")

    assert (said.status, "has no step 9 (the latest is 2)" in said.err) == (1, True)


@pytest.mark.thinned(2)
@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("ls", "RUN"), ("show", "RUN"), ("du", "RUN"), ("rm", "-n", "RUN", "--step", "1")],
)
def test_no_array_library_is_loaded_that_is_not_needed(stored: Stored, arguments: tuple[str, ...]) -> None:
    run = stored.run / "2" if arguments[0] in ("show", "du") else stored.run
    program = """
import sys
from penstock.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print(status, *[name for name in ("jax", "rich", "matplotlib", "tensorstore") if name in sys.modules])
"""
    command = [sys.executable, "-c", program, *[str(run) if part == "RUN" else part for part in arguments]]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=SOURCE)

    assert said.stdout.splitlines()[-1] == "0"


def said_on_a_terminal(command: list[str], environment: dict[str, str]) -> str:
    """Return all that a command writes to a terminal, read until the last one who writes there has ended."""
    ours, terminal = os.openpty()
    with subprocess.Popen(command, stdout=terminal, cwd=SOURCE, env=environment) as run:
        os.close(terminal)
        said = b""
        with suppress(OSError):  # Linux's way to tell the end
            while part := os.read(ours, 65536):
                said += part

    os.close(ours)
    assert run.returncode == 0
    return said.decode()


@pytest.mark.process
@pytest.mark.parametrize(("form", "shown"), [((), "{}"), (("--flat",), "['{}']")])
def test_on_a_terminal_it_is_a_table_with_whole_names(
    tmp_path: Path, form: tuple[str, ...], shown: str
) -> None:
    long = "a" * 150
    penstock.sync.save(tmp_path / "c", {long: 1, "b": 2})
    environment = {**os.environ, "COLUMNS": "40", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    for name, is_bold in (("TERM", True), ("NO_COLOR", False)):
        command = [sys.executable, "-m", "penstock", "show", str(tmp_path / "c"), *form]
        said = said_on_a_terminal(command, {**environment, name: "xterm"})

        assert shown.format(long) in said.split()
        assert "2 leaves" in said
        assert ("\x1b[1m" in said) is is_bold


def test_ls_of_a_folder_of_saved_trees_lists_each(tmp_path: Path, call: Call) -> None:
    for name in ("before", "after"):
        penstock.sync.save(tmp_path / name, {"w": [1.0]})

    assert [row[:2] for row in call("ls", tmp_path).rows] == [["after", "finished"], ["before", "finished"]]


def test_ls_marks_pinned_steps(stored: Stored, call: Callable[..., Said]) -> None:
    with penstock.sync.CheckpointManager(stored.run) as manager:
        manager.pin(1)
        while not (pinned := [row[0] for row in call("ls", stored.run).rows if row[5] == "pinned"]):
            pass  # it is written by a thread

        assert pinned == ["1"]
        listed = call("ls", stored.run, "--best", "loss", "--json").document["steps"]
        assert [step["is_pinned"] for step in listed if step["step"] == 1] == [True]

    assert "pinned" not in {row[5] for row in call("ls", stored.run).rows}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ls", "RUN", "--best", "Loss"), "no step has the metric 'Loss'; did you mean 'loss'?"),
        (("show", "RUN", "--only", "parms.*"), "no leaf matches 'parms.*'; did you mean 'params.*'?"),
        (("show", "RUN", "--only", "params.*", "--only", "xyz"), "no leaf matches 'xyz'; there are "),
        (("diff", "RUN", "1", "--only", "params.v"), "no leaf matches 'params.v'; there are "),
        (("du", "RUN/7"), "run/7: does not exist: no such step (the latest is 2)"),
        (("du", "RUN", "--step", "-1"), "run: has no step -1 (the first is 0)"),
        (("config", "reference", "memroy"), "no key begins with 'memroy'; did you mean 'memory'?"),
        (
            ("config", "reference", "concurency"),
            "did you mean save.encode.concurrency, save.",
        ),
    ],
)
def test_what_matches_nothing_is_an_error_that_names_the_nearest(
    kept: Stored, call: Call, arguments: tuple[str, ...], said: str
) -> None:
    failed = call(*[word.replace("RUN", str(kept.run)) for word in arguments])

    assert (failed.status, failed.out) == (2 if arguments[0] == "diff" else 1, "")
    assert said in failed.err
    assert len(failed.err.splitlines()) == 1


def test_ls_marks_no_best_where_nothing_has_metrics_yet(tmp_path: Path, call: Call) -> None:
    penstock.sync.save(tmp_path / "c", [1])

    assert call("ls", tmp_path, "--best", "loss").status == 0
