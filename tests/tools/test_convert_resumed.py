"""A conversion that was interrupted goes on where it was, and its result is as if it had not been."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
import pytest

import penstock
from penstock.errors import SpecError, StorageError
from penstock.handlers import LocalStore
from penstock.rules import Cast, Rules, Stack, Transpose
from penstock.testing import FaultyStore

LIMIT: Final = 128 * 1024
"""Of memory; so much is written between two records of what is done."""

OF_ITS_TIME: Final = frozenset(
    {"_CHECKPOINT_METADATA", "_PENSTOCK_INTEGRITY", "manifest.ocdbt", "commit_success.txt"}
)
"""Documents with the time of the conversion, and the database's own number, in them."""

FORMATS: Final = ("orbax", "huggingface", "safetensors", "zarr", "coded", "coded zarr")

FORMS: Final = {
    "zarr": penstock.SaveFormat(ocdbt=False, zarr=3),
    "coded": penstock.SaveFormat(codec="zstd:1", chunk_byte_size=LIMIT // 4),
    "coded zarr": penstock.SaveFormat(ocdbt=False, zarr=3, codec="zstd:1", chunk_byte_size=LIMIT // 4),
}
"""Of Orbax's layout. Where encoded chunks are in a database depends on who was faster."""

DYING: Final = """
import os, sys
import penstock
from penstock.handlers import LocalStore
from penstock.kernel.protocols.stores import StoreWrapper

class Dying(StoreWrapper):
    def call(self, operation, *given, **options):
        if operation == "write_file" and given[0].endswith("_PENSTOCK_JOURNAL/00000004"):
            os._exit(9)

        return super().call(operation, *given, **options)

store, limit = Dying(LocalStore()), int(sys.argv[3])
penstock.sync.convert(sys.argv[1], sys.argv[2], format="orbax", store=store, memory_limit=limit)
"""
"""A process that dies where it would write its fourth record."""


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tree() -> dict[str, Any]:
    """Leaves of many sizes: packed, alone, in several pieces, in chunks, and without bytes."""
    small = {f"s{number}": noise(3 + number, seed=number) for number in range(20)}
    even = {f"e{number}": noise(16 * (1 + number), seed=number) for number in range(8)}
    large = {f"l{number}": noise(200, 130, seed=number) for number in range(8)}
    return {**small, **even, **large, "none": np.zeros((0, 3), np.int8), "scalar": np.float32(3)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "ckpt"
    penstock.sync.save(path, tree())
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of arrays in chunks, small and large ones."""
    path = tmp_path_factory.mktemp("chunked") / "ckpt"
    arrays = {"a": noise(300, 400), "b": noise(64, 8, seed=1), "c": noise(5, seed=2)}
    for_chunks = {
        "a": penstock.SaveArgs(chunk_byte_size=160_000),
        "b": penstock.SaveArgs(chunk_byte_size=100),
    }
    penstock.sync.save(path, arrays, save_args={**for_chunks, "c": None})
    return path


def contents(path: Path, written: str = "") -> Any:
    """All bytes of a result, but for names drawn at random and times."""
    if written == "coded":
        return {name: np.asarray(value).tobytes() for name, value in penstock.sync.restore(path).items()}

    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    named = {
        name: data for name, data in files.items() if not name.startswith("d/") and name not in OF_ITS_TIME
    }
    drawn = Counter(data for name, data in files.items() if name.startswith("d/"))
    return named, drawn, files.keys() & OF_ITS_TIME


def convert(source: Path, out: Path, written: str, **options: Any) -> Any:
    options = {"memory_limit": LIMIT, "save_format": FORMS.get(written), **options}
    written = "orbax" if written in FORMS else written
    return penstock.sync.convert(source, out, format=written, **options)  # type: ignore[arg-type]  # a literal


def interrupted(source: Path, out: Path, written: str, at: int | tuple[str, int], **options: Any) -> bool:
    """Begin a conversion that ends at one operation of the store; False if it does without that one."""
    store = FaultyStore(LocalStore())
    if isinstance(at, int):
        store.fail_at(at)
    else:
        store.fail_on(*at)

    try:
        convert(source, out, written, store=store, resume=True, **options)
    except StorageError:
        assert not out.exists()
        return True

    return False


def steps_of(source: Path, out: Path, written: str) -> list[str]:
    """Convert, and return the operations up to the publication."""
    store = FaultyStore(LocalStore())
    convert(source, out, written, store=store, resume=True)
    names = [step.name for step in store.operations]
    return names[: names.index("publish") + 1]


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("orbax", "source"),
        pytest.param("orbax", "chunked", marks=pytest.mark.slow),
        pytest.param("huggingface", "source", marks=pytest.mark.slow),
        pytest.param("huggingface", "chunked", marks=pytest.mark.slow),
        ("safetensors", "source"),
        pytest.param("safetensors", "chunked", marks=pytest.mark.slow),
        pytest.param("zarr", "source", marks=pytest.mark.slow),
        pytest.param("zarr", "chunked", marks=pytest.mark.slow),
        pytest.param("coded", "source", marks=pytest.mark.slow),
        pytest.param("coded", "chunked", marks=pytest.mark.slow),
        pytest.param("coded zarr", "source", marks=pytest.mark.slow),
        pytest.param("coded zarr", "chunked", marks=pytest.mark.slow),
    ],
)
def test_wherever_it_ends_the_next_one_goes_on_to_the_same_bytes(
    tmp_path: Path, written: str, kind: str, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(kind)
    steps = steps_of(source, tmp_path / "whole", written)
    expected = contents(tmp_path / "whole", written)

    # Most operations are alike; all of the last ones are tried, which commit.
    ends = [*range(1, len(steps) - 15, len(steps) // 12), *range(len(steps) - 15, len(steps) + 1)]
    n_interrupted = 0
    for at in ends:
        out = tmp_path / str(at)
        if interrupted(source, out, written, at):
            n_interrupted += 1
            convert(source, out, written, resume=True)

        assert contents(out, written) == expected, steps[at - 1]
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["whole", str(at)])
        LocalStore().remove_tree(str(out))

    assert n_interrupted > 15


@pytest.mark.parametrize("written", FORMATS)
def test_it_may_be_interrupted_again_and_again(source: Path, tmp_path: Path, written: str) -> None:
    steps_of(source, tmp_path / "whole", written)

    for record in (2, 3, 4):  # each goes on further than the one before
        assert interrupted(source, tmp_path / "out", written, ("write_file", record))
    convert(source, tmp_path / "out", written, resume=True)

    assert contents(tmp_path / "out", written) == contents(tmp_path / "whole", written)


@pytest.mark.parametrize("written", FORMATS)
def test_what_was_recorded_is_not_written_again(source: Path, tmp_path: Path, written: str) -> None:
    steps = steps_of(source, tmp_path / "whole", written)
    assert interrupted(source, tmp_path / "out", written, len(steps) - 5)

    report = convert(source, tmp_path / "out", written, resume=True)

    total = sum(value.nbytes for value in tree().values())
    assert report.nbytes < total / 4
    assert report.n_leaves == len(tree())


@pytest.mark.parametrize("written", FORMATS)
def test_a_large_leaf_goes_on_in_its_middle(tmp_path: Path, written: str) -> None:
    array = noise(1000, 400)
    penstock.sync.save(tmp_path / "source", {"w": array, "b": array[:3]})
    steps = steps_of(tmp_path / "source", tmp_path / "whole", written)
    assert interrupted(tmp_path / "source", tmp_path / "out", written, len(steps) * 2 // 3)

    report = convert(tmp_path / "source", tmp_path / "out", written, resume=True)

    assert report.nbytes_kept > array.nbytes / 4
    again = convert(tmp_path / "source", tmp_path / "again", written)
    assert report.nbytes + report.nbytes_kept == again.nbytes
    assert contents(tmp_path / "out", written) == contents(tmp_path / "whole", written)


# The small files of "zarr" come first: no record is written before all of them.
@pytest.mark.parametrize("written", [form for form in FORMATS if form != "zarr"])
def test_rules_go_on_too(source: Path, tmp_path: Path, written: str) -> None:
    rules = Rules(
        [
            Stack([f"l{number}" for number in range(4)], "stacked"),
            Transpose("l5", "turned"),
            Cast("l6", dtype="bfloat16"),
        ],
        rest="keep",
    )
    convert(source, tmp_path / "whole", written, rules=rules)
    for record in (30,) if "zarr" in written else (2, 3):  # there each small chunk is a file, too
        assert interrupted(source, tmp_path / "out", written, ("write_file", record), rules=rules)

    report = convert(source, tmp_path / "out", written, rules=rules, resume=True)

    assert report.nbytes < 0.9 * sum(value.nbytes for value in tree().values())
    assert contents(tmp_path / "out", written) == contents(tmp_path / "whole", written)


@pytest.mark.process
def test_one_that_was_killed_goes_on_although_nobody_had_said_so(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", "orbax")
    command = [sys.executable, "-c", DYING, str(source), str(tmp_path / "out"), str(LIMIT)]
    assert subprocess.run(command, check=False).returncode == 9

    report = convert(source, tmp_path / "out", "orbax", resume=True)

    assert report.nbytes < 0.8 * sum(value.nbytes for value in tree().values())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("written", FORMATS)
def test_a_byte_that_changed_since_is_written_again(source: Path, tmp_path: Path, written: str) -> None:
    steps = steps_of(source, tmp_path / "whole", written)
    assert interrupted(source, tmp_path / "out", written, len(steps) - 5)
    (build,) = [path for path in tmp_path.iterdir() if path.name.startswith("out.")]
    there = [path for path in build.rglob("*") if path.is_file() and "JOURNAL" not in str(path)]
    files = [path for path in there if path.stat().st_size > LIMIT // 8]
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    convert(source, tmp_path / "out", written, resume=True)

    assert files
    assert contents(tmp_path / "out", written) == contents(tmp_path / "whole", written)


class TestBegunAnew:
    def test_if_the_source_has_changed(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        first, second = tree(), {name: value + 1 for name, value in tree().items()}
        penstock.sync.save(tmp_path / "source", first)
        interrupted_at_the_end(tmp_path / "source", tmp_path / "out")
        penstock.sync.save(tmp_path / "source", second, overwrite=True)

        convert(tmp_path / "source", tmp_path / "out", "orbax", resume=True)

        found = penstock.sync.restore(tmp_path / "out")
        for name, value in second.items():
            np.testing.assert_array_equal(found[name], value)

    def test_if_an_option_has_changed(self, source: Path, tmp_path: Path) -> None:
        interrupted_at_the_end(source, tmp_path / "out")

        convert(source, tmp_path / "out", "orbax", resume=True, rename={"l0": "l1", "l1": "l0"})

        found = penstock.sync.restore(tmp_path / "out")
        np.testing.assert_array_equal(found["l0"], tree()["l1"])

    def test_without_resume(self, source: Path, tmp_path: Path) -> None:
        interrupted_at_the_end(source, tmp_path / "out")

        report = convert(source, tmp_path / "out", "orbax")

        assert report.nbytes == sum(value.nbytes for value in tree().values())
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupted_at_the_end(source: Path, out: Path) -> None:
    store = FaultyStore(LocalStore())
    store.fail_on("publish")
    with pytest.raises(StorageError):
        convert(source, out, "orbax", store=store, resume=True)


def test_without_resume_a_failure_leaves_nothing(source: Path, tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    store.fail_on("publish")
    with pytest.raises(StorageError):
        convert(source, tmp_path / "out", "orbax", store=store)

    assert [*tmp_path.iterdir()] == []


async def test_a_cancelled_one_goes_on(source: Path, tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    hang = store.hang_on("sync_file", 3)
    async with anyio.create_task_group() as tasks:

        async def begin() -> None:
            await penstock.convert(source, tmp_path / "out", store=store, resume=True, memory_limit=LIMIT)

        tasks.start_soon(begin)
        await hang.wait_reached()
        tasks.cancel_scope.cancel()
        hang.release()

    assert not (tmp_path / "out").exists()
    report = await penstock.convert(source, tmp_path / "out", resume=True, memory_limit=LIMIT)
    assert report.nbytes < sum(value.nbytes for value in tree().values())


class TestRefused:
    def test_with_the_codec_auto(self, source: Path, tmp_path: Path) -> None:
        form = penstock.SaveFormat(codec="auto")
        with pytest.raises(SpecError, match="with the codec 'auto'"):
            convert(source, tmp_path / "out", "orbax", resume=True, save_format=form)

        assert not (tmp_path / "out").exists()

    async def test_to_a_bucket(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="a bucket gives each save a place"):
            await penstock.convert(tmp_path / "never read", "s3://bucket/out", resume=True)

    def test_an_npz_file(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="in one go"):
            convert(source, tmp_path / "out.npz", "npz", resume=True)

    def test_a_directory_of_steps(self, tmp_path: Path) -> None:
        for step in (1, 2):
            penstock.sync.save(tmp_path / "run" / str(step), {"w": np.zeros(3)})

        with pytest.raises(SpecError, match="only one step can be resumed"):
            convert(tmp_path / "run", tmp_path / "out", "orbax", resume=True)
