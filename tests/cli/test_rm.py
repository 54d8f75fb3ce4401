"""`penstock rm` deletes what is named, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.cli.conftest import Said, Stored

import penstock
from penstock.handlers import LocalStore

Call = Callable[..., Said]


def test_rm_deletes_steps_of_a_run(stored: Stored, call: Call) -> None:
    said = call("rm", stored.run, "--step", "1", "--step", "2", "--json")

    assert [entry["path"] for entry in said.document["deleted"]] == [str(stored.run / n) for n in "12"]
    assert not (stored.run / "1").exists()
    assert (stored.run / "0").exists()


def test_rm_deletes_checkpoints_of_every_kind(stored: Stored, call: Call) -> None:
    assert call("rm", stored.items, stored.tensors, stored.shards).status == 0

    assert sorted(path.name for path in stored.folder.iterdir()) == ["run"]


def test_a_dry_run_deletes_nothing(stored: Stored, call: Call) -> None:
    said = call("rm", "-n", stored.tensors)

    assert (said.status, "would be deleted" in said.out) == (0, True)
    assert stored.tensors.exists()


def test_rm_takes_no_whole_run_by_a_slip(stored: Stored, call: Call) -> None:
    said = call("rm", stored.tensors, stored.run)

    assert (said.status, "name those to delete with --step" in said.err) == (1, True)
    assert stored.tensors.exists()  # all are looked at before the first one goes


def test_rm_leaves_what_is_being_read(stored: Stored, call: Call) -> None:
    held = LocalStore().hold_reading(str(stored.run / "1"))
    try:
        said = call("rm", stored.run / "1")
    finally:
        held.release()

    assert (said.status, "somebody builds, reads or deletes a checkpoint here" in said.err) == (1, True)
    assert (stored.run / "1").exists()


@pytest.mark.parametrize("options", [[], ["-n"]])
def test_rm_takes_no_folder_of_checkpoints(stored: Stored, call: Call, options: list[str]) -> None:
    for name in ("a", "b"):
        penstock.sync.save(stored.folder / "both" / name, {"w": np.ones(2)})

    said = call("rm", *options, stored.tensors, stored.folder / "both")

    assert (said.status, "only checkpoints are deleted" in said.err) == (1, True)
    assert (stored.tensors.exists(), (stored.folder / "both" / "a").exists()) == (True, True)
