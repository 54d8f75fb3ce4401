"""`cp`, `gc`, `watch`, `doctor` and `completion`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.cli.conftest import Said, Stored
from tests.own_files import REPORTS

import penstock
from penstock.cli.doctor_command import settings
from penstock.handlers import LocalStore

Call = Callable[..., Said]
SOURCE = Path(__file__).parents[2] / "src"


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}

    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("at", range(6))
def test_cp_copies_every_file_as_it_is(stored: Stored, tmp_path: Path, call: Call, at: int) -> None:
    source, target = Path(stored.each()[at]), tmp_path / "new" / "copy"
    if source == stored.items:
        (source / "notes.txt").write_text("of another program")

    if source == stored.run:
        shutil.rmtree(source / "0")  # it is damaged

    said = call("cp", source, target)

    assert (said.status, said.err) == (0, "")
    expected = contents(source)
    if source == stored.run:  # not what an interrupted save left
        assert REPORTS in expected
        expected = {name: data for name, data in expected.items() if "tmp" not in name}
    assert contents(target) == expected
    assert [path.name for path in target.parent.iterdir()] == ["copy"]


def test_cp_copies_no_step_that_is_damaged_and_all_others(stored: Stored, tmp_path: Path, call: Call) -> None:
    data = next(path for path in sorted((stored.run / "1").rglob("d/*")) if path.is_file())
    data.write_bytes(data.read_bytes()[:-1] + b"?")

    said = call("cp", stored.run, tmp_path / "copy")

    assert (said.status, "1 checkpoint copied" in said.out) == (1, True)
    assert "2 steps not copied, because of damage:" in said.err
    assert f"{stored.run}/0/_CHECKPOINT_METADATA: differs from what was written" in said.err
    assert str(data) in said.err
    assert sorted(os.listdir(tmp_path / "copy")) == ["2", REPORTS]
    assert call("cp", stored.run / "1", tmp_path / "one").status == 1
    assert not (tmp_path / "one").exists()


def test_cp_of_a_snapshot_of_a_hub_has_the_files_and_not_its_links(
    stored: Stored, tmp_path: Path, call: Call
) -> None:
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for file in stored.shards.iterdir():
        (cache / "blobs" / f"of-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/of-{file.name}")

    assert call("cp", snapshot, tmp_path / "copy").status == 0
    assert contents(tmp_path / "copy") == contents(stored.shards)
    assert not any(path.is_symlink() for path in (tmp_path / "copy").iterdir())


@pytest.mark.parametrize("target", ["/etc/hostname", "nowhere"])
def test_cp_refuses_a_link_that_leads_out_or_nowhere(
    stored: Stored, tmp_path: Path, call: Call, target: str
) -> None:
    (stored.items / "link").symlink_to(target)

    said = call("cp", stored.items, tmp_path / "copy")

    assert (said.status, f"{stored.items}/link: is" in said.err) == (1, True)
    assert not (tmp_path / "copy").exists()


def test_cp_replaces_nothing(stored: Stored, call: Call) -> None:
    before = contents(stored.items)
    said = call("cp", stored.tensors, stored.items)

    assert (said.status, said.out) == (1, "")
    assert f"{stored.items}: exists, and is not replaced; delete it, or copy to another place" in said.err
    assert contents(stored.items) == before


def test_cp_of_a_run_copies_nothing_if_one_step_is_there(stored: Stored, tmp_path: Path, call: Call) -> None:
    (tmp_path / "copy" / "2").mkdir(parents=True)

    for more in ([], ["-n"]):
        said = call("cp", stored.run, tmp_path / "copy", *more)

        assert (said.status, f"{tmp_path}/copy/2: exists" in said.err) == (1, True)
        assert os.listdir(tmp_path / "copy") == ["2"]


def test_cp_refuses_what_is_being_deleted(stored: Stored, tmp_path: Path, call: Call) -> None:
    held = LocalStore().hold(str(stored.items))
    try:
        said = call("cp", stored.items, tmp_path / "copy")
    finally:
        held.release()

    assert said.status == 1
    assert not (tmp_path / "copy").exists()


def test_a_failed_cp_leaves_nothing(stored: Stored, tmp_path: Path, call: Call) -> None:
    (stored.items / "state" / "d2").mkdir()
    os.mkfifo(stored.items / "state" / "d2" / "fifo")

    said = call("cp", stored.items, tmp_path / "copy")

    assert (said.status, "d2/fifo: is a pipe, a socket or a device" in said.err) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["stored"]


def test_a_dry_cp_only_says(stored: Stored, tmp_path: Path, call: Call) -> None:
    said = call("cp", "-n", stored.run, tmp_path / "copy")

    assert [Path(line.split()[-1]).name for line in said.out.splitlines()] == ["0", "1", "2", REPORTS]
    assert not (tmp_path / "copy").exists()


def test_cp_copies_the_metadata_of_a_run_and_no_unfinished_step(tmp_path: Path, call: Call) -> None:
    with penstock.sync.CheckpointManager(tmp_path / "run", metadata={"by": "me"}) as manager:
        manager.save(1, {"a": 1})
    unfinished = tmp_path / "run" / "2"  # as Orbax builds on object stores
    unfinished.mkdir()
    (unfinished / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1}')

    copied = call("cp", tmp_path / "run", tmp_path / "copy", "--json").document["copied"]

    assert [Path(entry["destination"]).name for entry in copied] == ["metadata", "1", REPORTS]
    with penstock.sync.CheckpointManager(tmp_path / "copy", read_only=True) as manager:
        assert manager.all_steps() == (1,)
        assert manager.root_metadata() == {"by": "me"}


def test_a_copied_run_has_the_reports_of_its_saves_unless_there_are_others(
    stored: Stored, tmp_path: Path, call: Call
) -> None:
    copy, others = tmp_path / "copy", tmp_path / "others"
    with penstock.sync.CheckpointManager(others) as manager:
        manager.save(7, {"a": 1})

    for target, *more in ((copy,), (others,), (tmp_path / "one", "--step", "2")):
        call("cp", stored.run, target, *more)  # but for step 0, which is damaged

    def named(run: Path) -> list[str]:
        return [report["name"] for report in json.loads((run / REPORTS).read_bytes())["reports"]]

    assert (named(copy), named(others)) == (["0", "1", "2"], ["7"])
    assert not (tmp_path / REPORTS).exists()
    assert [row[0] for row in call("ls", copy).rows] == ["1", "2"]
    assert sorted(os.listdir(copy)) == ["1", "2", REPORTS]


def test_convert_prints_a_document(stored: Stored, tmp_path: Path, call: Call) -> None:
    document = call("convert", stored.tensors, tmp_path / "c", "--json").document

    assert (document["path"], document["n_leaves"]) == (str(tmp_path / "c"), 2)


def test_gc_removes_what_was_left_and_nothing_else(stored: Stored, call: Call) -> None:
    before = contents(stored.run)

    assert [row[0] for row in call("gc", stored.folder, "-n").rows] == ["left"]
    assert contents(stored.run) == before
    document = call("gc", stored.folder, "--json").document

    assert [(entry["state"], entry["nbytes"]) for entry in document["left"]] == [("removed", 100)]
    assert contents(stored.run) == {name: data for name, data in before.items() if "tmp" not in name}
    assert call("gc", stored.folder).rows == []


def test_gc_leaves_what_a_live_save_holds(stored: Stored, call: Call) -> None:
    held = LocalStore().hold(str(stored.run / "4.orbax-checkpoint-tmp"))
    try:
        listed = {row[0]: row[1] for row in call("ls", stored.run).rows}
        states = [row[0] for more in ([], ["-n"]) for row in call("gc", stored.run, *more).rows]
    finally:
        held.release()

    assert states == ["in use", "in use"]
    assert listed["4.orbax-checkpoint-tmp"] == "saving"
    assert (stored.run / "4.orbax-checkpoint-tmp").exists()


def test_watch_prints_steps(kept: Stored, call: Call) -> None:
    latest = call("watch", kept.run, "--timeout", "0").rows
    after = call("watch", kept.run, "--timeout", "0", "--after", "0").rows

    assert [row[0] for row in latest] == ["2"]
    assert [row[0] for row in after] == ["1", "2"]
    assert latest[0][3] == '{"loss": 0.25}'
    assert call("watch", kept.run, "--timeout", "0", "--json").document["metrics"] == {"loss": 0.25}


def test_doctor_says_what_a_file_system_gives(tmp_path: Path, call: Call) -> None:
    said = call("doctor", tmp_path)
    facts = {row[0]: row[1:] for row in said.rows}

    assert said.status == 0
    assert facts["hard links"][1] in ("ok", "slower")
    assert facts["penstock"][:2] == [penstock.__version__, "ok"]
    assert list(tmp_path.iterdir()) == []
    assert {entry["what"] for entry in call("doctor", tmp_path, "--json").document} == set(facts)


def test_doctor_tries_a_directory_that_is_not_there_yet_where_it_would_be_made(
    tmp_path: Path, call: Call
) -> None:
    said = call("doctor", tmp_path / "new" / "run")

    assert said.status == 0
    assert said.rows[0] == ["path", str(tmp_path / "new/run"), "ok", f"is not there yet; tried in {tmp_path}"]
    assert list(tmp_path.iterdir()) == []


def test_secrets_are_masked() -> None:
    found = {
        fact.what: fact.value
        for fact in settings(
            {
                "AWS_SECRET_ACCESS_KEY": "hidden",
                "AWS_REGION": "eu",
                "PENSTOCK_STORE__S3__ENDPOINT": "https://user:hidden@host/x",
                "HOME": "/root",
            }
        )
    }

    assert found == {
        "AWS_REGION": "eu",
        "AWS_SECRET_ACCESS_KEY": "********",
        "PENSTOCK_STORE__S3__ENDPOINT": "https://********@host/x",
    }


@pytest.mark.process
def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    line = "penstock show --st"
    answer = tmp_path / "answer"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run([sys.executable, "-m", "penstock"], check=False, cwd=SOURCE, env=environment)

    assert answer.read_text().strip() == "--step"


def test_completion_prints_a_script(call: Call) -> None:
    assert "_python_argcomplete" in call("completion", "bash").out


def test_convert_renames_and_casts(stored: Stored, call: Callable[..., Said], tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    names = ("--rename", "w=model.w", "--rename", "['b.c']=")
    assert call("convert", stored.items / "state", target, *names, "--dtype", "float16").status == 0
    assert call("show", target).rows[0][1:5] == ["['model.w']", "np.ndarray", "4x3", "float16"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rename", "w"], "--rename w: not of the form OLD=NEW"),
        (["--rename", "v=w"], "--rename names it, but no stored leaf has this name"),
        (["--dtype", "float16", "--dtype", "w=int8"], "--dtype float16: is for all arrays"),
        (["--dtype", "v=int8"], "--dtype names 'v'"),
        (["--dtype", "floot"], "'floot' is not a dtype"),
    ],
)
def test_what_convert_cannot_change_is_told_in_options(
    kept: Stored, call: Callable[..., Said], tmp_path: Path, arguments: list[str], problem: str
) -> None:
    said = call("convert", kept.items / "state", tmp_path / "new", *arguments)
    assert said.status == 1
    assert problem in said.err
    assert not (tmp_path / "new").exists()


def test_convert_writes_and_reads_npz(stored: Stored, tmp_path: Path, call: Call) -> None:
    target = tmp_path / "m.npz"
    said = call("convert", stored.items, target, "--item", "state", "--json")

    assert (said.status, said.document["format"], said.document["n_leaves"]) == (0, "npz", 2)
    with np.load(target) as archive:
        assert (archive["w"].shape, archive["b.c"].tolist()) == ((4, 3), [1.0, 1.0])

    assert "give --overwrite" in call("convert", stored.items, target, "--item", "state").err
    assert call("convert", target, tmp_path / "flat", "--flat").status == 0
    assert [row[1] for row in call("show", tmp_path / "flat").rows] == ["['b.c']", "['w']"]


def test_what_npz_cannot_hold_is_told_in_options(tmp_path: Path, call: Call) -> None:
    tree = {"h": np.ones(2, ml_dtypes.bfloat16), "empty": None, "s t": [None]}
    penstock.sync.save(tmp_path / "old", tree)

    empty = call("convert", tmp_path / "old", tmp_path / "a.npz").err
    half = call("convert", tmp_path / "old", tmp_path / "a.npz", "--rename", "empty=", "--rename", "s t=").err
    assert "leave them out, as in --rename empty=" in empty
    assert "cast it, as in --dtype float32" in half
    assert not (tmp_path / "a.npz").exists()
