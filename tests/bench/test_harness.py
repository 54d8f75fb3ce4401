"""The parts that touch the machine, each on something small; and the whole, on five leaves."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.bench import caches, memory, options, place, trees
from tests.bench.__main__ import main
from tests.bench.checking import WrongBytesError, check
from tests.bench.contenders import raw
from tests.bench.contenders.everyone import ours
from tests.bench.contenders.labels import COLD, LABELS
from tests.bench.results import Operation
from tests.bench.setting import bytes_not_shared
from tests.bench.timing import measure
from tests.bench.trees import State
from tests.bench.workloads import BY_NAME, WORKLOADS

MIB = 2**20


def odd_state() -> State:
    """Leaves that end nowhere near a page."""
    sizes = {"a": (1,), "b": (3, 5), "c": (2 * MIB + 7,), "d": (0,), "e": (MIB, 5)}
    return State({name: jnp.arange(np.prod(shape)).reshape(shape) for name, shape in sizes.items()})


@pytest.mark.parametrize("contender", [raw.Buffered(2, 3), raw.Direct(2)], ids=lambda each: each.label)
def test_raw_system_calls_restore_what_they_saved(tmp_path: Path, contender: Any) -> None:
    state = odd_state()
    try:
        contender.save(tmp_path / "checkpoint", state)
    except OSError as error:
        pytest.skip(f"not on this file system: {error}")

    restored = contender.restore(tmp_path / "checkpoint", state)
    check(contender.leaves(restored, state), state, trees.into_numpy(state), contender.label)
    assert (tmp_path / "checkpoint" / "raw").stat().st_size == state.nbytes


def test_raw_calls_are_full_but_for_the_last_and_hold_few_buffers() -> None:
    views = [np.full(size, size, np.uint8) for size in (5, 3, 9, 1, 1, 1, 1)]
    calls = list(raw.gathered(views, 8, most=3))

    assert [offset for offset, _ in calls] == [0, 8, 16, 19]
    assert [[part.size for part in parts] for _, parts in calls] == [[5, 3], [8], [1, 1, 1], [1, 1]]
    assert b"".join(part.tobytes() for _, parts in calls for part in parts) == b"".join(map(bytes, views))


def test_a_failure_in_a_thread_is_raised() -> None:
    def fail(call: int) -> None:
        raise OSError(f"call {call}")

    with pytest.raises(OSError, match="call 1"):
        raw.in_threads(2, [1], fail)


Change = Callable[[list[Any]], list[Any]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda leaves: [leaves[0] + 1, leaves[1]], "a differs"),
        (lambda leaves: leaves[:1], "1 leaves instead of 2"),
        (lambda leaves: [leaves[0].astype(jnp.int16), leaves[1]], "a is int16"),
        (lambda leaves: [np.asarray(leaves[0]), leaves[1]], "a is a ndarray"),
        (lambda leaves: [jax.device_put(leaves[0], jax.devices()[1]), leaves[1]], "a is sharded otherwise"),
    ],
)
def test_wrong_bytes_make_the_benchmark_void(change: Change, problem: str) -> None:
    state = State({"a": jnp.arange(4), "b": jnp.array([float("nan")])})
    target = trees.into_jax(state)
    check(iter(state.leaves), state, target, "somebody")

    with pytest.raises(WrongBytesError, match=problem):
        check(iter(change(state.leaves)), state, target, "somebody")


@pytest.mark.parametrize(
    "workload",
    [w.name for w in WORKLOADS if w.name not in {"many", "million"} and not w.n_steps and not w.n_processes],
)
def test_trees_are_as_large_as_they_say(workload: str) -> None:
    assert trees.abstract(workload, 1).nbytes == pytest.approx(BY_NAME[workload].nbytes, rel=0.05)


def test_trees_have_as_many_leaves_as_the_issue_wants() -> None:
    with_tree = [
        name for name, workload in BY_NAME.items() if not workload.n_steps and not workload.n_processes
    ]
    counts = {name: len(trees.abstract(name, 1 if name != "million" else 1e-3).leaves) for name in with_tree}

    assert counts == {
        "large": 8,
        "transformer": 247,
        "small": 10_000,
        "first": 10_000,
        "many": 100_000,
        "half": 8,
        "million": 1000,
        "one": 1,
        "sharded": 4,
        "changed": 100,
        "beside": 8,
        "tiny": 5,
        "shards-1000": 1000,
        "shards-4000": 4000,
    }


def test_five_percent_change_and_the_rest_are_the_same_objects() -> None:
    state = trees.build("changed", 1 / 1280)
    after = trees.changed(state)

    same = [one is other for one, other in zip(state.leaves, after.leaves, strict=True)]
    assert same.count(False) == 5
    assert not np.array_equal(state.leaves[0], after.leaves[0])


async def test_a_second_save_writes_what_changed(tmp_path: Path) -> None:
    # 80 KiB each, so that what is recorded beside the arrays weighs little.
    state = trees.build("changed", 1 / 64)
    results = await measure(BY_NAME["changed"], state, 1, tmp_path, ours()[:1], [])

    assert [note for note in results.notes if note.failed] == []
    (first,) = results.written("changed", "penstock", Operation.SAVE)
    (second,) = results.written("changed", "penstock", Operation.SECOND_SAVE)
    assert first > state.nbytes
    assert second < first / 10


async def test_leaves_of_numpy_are_looked_at_too(tmp_path: Path) -> None:
    state = trees.build("million", 1 / 10_000)
    results = await measure(BY_NAME["million"], state, 1, tmp_path, ours()[:1], [])

    assert [note for note in results.notes if note.failed] == []
    assert {sample.operation for sample in results.samples} == set(BY_NAME["million"].operations)


def test_a_file_is_cached_after_warming_and_not_after_dropping(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    caches.settle()
    caches.warm(path)

    assert caches.resident(path) == 1
    assert caches.drop(path) is (caches.resident(path) == 0)


def test_shared_files_do_not_count_as_written(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "kept").write_bytes(bytes(1000))
    os.link(first / "kept", second / "kept")
    (second / "new").write_bytes(bytes(10))

    assert bytes_not_shared(second, first) == 10
    assert bytes_not_shared(second, None) == 1010


def test_the_place_is_removed_even_when_the_run_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with place.open_place(tmp_path) as folder:
            (folder / "checkpoint").write_bytes(b"x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()

    assert list(tmp_path.iterdir()) == []


def test_places_of_killed_runs_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        dead = tmp_path / f"{place.PREFIX}{ended.pid}-x"

    for kept in ("mine", f"{place.PREFIX}{os.getpid()}-x"):
        (tmp_path / kept).mkdir()
    dead.mkdir()
    with place.open_place(tmp_path):
        assert not dead.exists()

    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_noticed_beforehand(tmp_path: Path) -> None:
    with pytest.raises(place.NoSpaceError, match="GiB are needed"):
        place.check_space(tmp_path, 2**60, 1)


def test_memory_is_what_only_the_process_can_give_back() -> None:
    status = (
        "Name:\tx\nVmHWM:\t   90 kB\nRssAnon:\t  10 kB\nRssFile:\t 500 kB\nRssShmem:\t   2 kB\nThreads:\t3\n"
    )

    assert memory.memory_of(status)["own"] == 12 * 1024
    assert memory.memory_of(status)["VmHWM"] == 90 * 1024


def test_unknown_workloads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--only", "large,huge"])

    assert "no workload is called 'huge'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_the_benchmark_runs_on_five_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"--dir": tmp_path / "place", "--json": tmp_path / "json", "--svg": tmp_path / "svg"}
    arguments = [text for option, path in files.items() for text in (option, str(path))]
    code = main(["--quick", "--rounds", "1", "--only", "tiny", "--no-orbax", "--no-memory", *arguments])

    record = json.loads((tmp_path / "json").read_text())
    assert [note for note in record["notes"] if note["failed"]] == []
    assert code == 0
    elsewhere = {"raw scandir", "nothing saved", "penstock, copied", "jax alone", *COLD[1:]}
    with_orbax = {label for label in LABELS if "rbax" in label}
    everyone = set(LABELS) - with_orbax - elsewhere
    saved = {s["contender"] for s in record["samples"] if s["operation"] == Operation.SAVE}
    restored = {who for _, who, what in record["checked"] if what == Operation.RESTORE_NUMPY}
    assert saved == everyone - {"penstock, unverified", "penstock, one-shot"}
    assert restored == everyone - {"penstock, first save", "raw O_DIRECT", "raw O_DIRECT, crc32c"}
    assert "5 leaves, 5.86 KiB" in capsys.readouterr().out
    assert (tmp_path / "svg").read_text().startswith("<svg")
    assert list((tmp_path / "place").iterdir()) == []
