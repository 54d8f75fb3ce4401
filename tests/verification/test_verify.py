"""A checkpoint at rest, intact and damaged in every way that bytes can be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file
from tests.every_item import every_item
from tests.unsealed import unseal

import penstock
from penstock import VerifyReport
from penstock.handlers import LocalStore
from penstock.handlers.formats.integrity import decode
from penstock.handlers.formats.orbax.item_survey import survey_item
from penstock.handlers.formats.verification import BLOCK_BYTES, check_ranges
from penstock.testing import FaultyStore


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))  # type: ignore[no-untyped-call]  # jax's
    tree = {
        "a": np.arange(1000),
        "b": [jnp.ones(50), jax.device_put(jnp.arange(3000.0), sharding)],
        "tiny": 3,
        "text": "t",
        "none": None,
        "empty": np.zeros((0, 3)),
    }
    path = tmp_path_factory.mktemp("verify") / "ckpt"
    penstock.sync.save(path, tree)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


def data_file(path: Path) -> Path:
    files = decode("", (path / "_PENSTOCK_INTEGRITY").read_bytes()).files
    return max((path / name for name in files), key=lambda file: file.stat().st_size)


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def verify(path: Path) -> VerifyReport:
    return penstock.sync.verify(path)


def test_what_was_just_saved_is_intact(saved: Path) -> None:
    found = verify(saved)

    assert found.intact
    assert not found.damages
    assert not found.unchecked
    assert not found.damaged_leaves
    assert found.n_leaves == 7
    assert found.nbytes == 8000 + 200 + 12000 + 8
    assert found.path == str(saved)


def test_every_changed_byte_is_found_with_the_leaf_it_belongs_to(copy: Path) -> None:
    file = data_file(copy)
    places = [(found.checksum, found.key_paths) for found in survey_item(LocalStore(), str(copy)).ranges]
    assert sorted({name for _, names in places for name in names}) == [
        "['a']",
        "['b'][0]",
        "['b'][1]",
        "['tiny']",
    ]
    for checksum, names in places:
        for offset in (checksum.offset, checksum.offset + checksum.nbytes - 1):
            flip(file, offset)
            found = verify(copy)
            flip(file, offset)

            (damage,) = found.damages
            assert not found.intact
            assert damage.key_paths == found.damaged_leaves == names
            assert (damage.offset, damage.nbytes) == (checksum.offset, checksum.nbytes)
            assert damage.file == str(file)
            assert "not those that were written" in str(damage)

    assert verify(copy).intact


def test_a_missing_file_damages_every_leaf_in_it(copy: Path) -> None:
    data_file(copy).unlink()

    found = verify(copy)

    assert set(found.damaged_leaves) == {"['a']", "['b'][0]", "['b'][1]", "['tiny']"}
    assert all("missing" in damage.problem for damage in found.damages)


def test_a_file_cut_short_damages_what_lay_behind(copy: Path) -> None:
    file = data_file(copy)
    last = survey_item(LocalStore(), str(copy)).ranges[-1]
    with file.open("r+b") as opened:
        opened.truncate(last.checksum.offset + last.checksum.nbytes - 1)

    found = verify(copy)

    assert found.damaged_leaves == last.key_paths
    assert "ends at byte" in found.damages[0].problem


def test_what_the_medium_refuses_is_no_damage(saved: Path) -> None:
    ranges = survey_item(LocalStore(), str(saved)).ranges
    for operation in ("open_data_file", "data.read_at", "file.read_at"):
        store = FaultyStore(LocalStore())
        store.fail_on(operation)
        findings = check_ranges(store, ranges)
        assert store.open_files == 0
        if any(done.name == operation for done in store.operations):
            assert {finding.kind for finding in findings} == {"unreadable"}
            assert "could not be read" in findings[0].problem


def test_a_large_range_is_read_block_by_block(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "c", {"a": np.arange(5 * BLOCK_BYTES // 16)})
    assert verify(tmp_path / "c").intact

    flip(data_file(tmp_path / "c"), BLOCK_BYTES + 1)
    assert verify(tmp_path / "c").damaged_leaves == ("['a']",)


def test_leaves_without_a_recorded_checksum_are_named(copy: Path) -> None:
    unseal(copy)
    file = copy / "_PENSTOCK_INTEGRITY"
    document: Any = msgpack.unpackb(file.read_bytes())
    survivors = {
        name: {column: data[: -(8 if column != "crc32c" else 4)] for column, data in columns.items()}
        for name, columns in document["files"].items()
    }
    file.write_bytes(msgpack.packb({**document, "files": survivors}))

    unseal(copy)
    found = verify(copy)

    assert (found.status, found.intact) == ("unchecked", False)
    assert not found.damages
    assert sorted(len(finding.key_paths) for finding in found.unchecked) == [0, 1]
    assert any("no digests of its documents" in finding.problem for finding in found.unchecked)


def drop_integrity(path: Path) -> None:
    unseal(path)
    (path / "_PENSTOCK_INTEGRITY").unlink()


def lose_integrity(path: Path) -> None:
    (path / "_PENSTOCK_INTEGRITY").unlink()


def add_a_document(path: Path) -> None:
    (path / "_strings.json").write_text("{}")


def add_a_file(path: Path) -> None:
    (path / "d" / ("0" * 32)).write_text("")


def change_a_document(path: Path) -> None:
    file = path / "_METADATA"
    file.write_bytes(file.read_bytes().replace(b"np.ndarray", b"jax.Array "))


def break_integrity(path: Path) -> None:
    (path / "_PENSTOCK_INTEGRITY").write_bytes(b"\xc1")


def lead_out(path: Path) -> None:
    (path / "_PENSTOCK_INTEGRITY").write_bytes(msgpack.packb({"version": 1, "files": {"../x": [[0, 1, 2]]}}))


def break_manifest(path: Path) -> None:
    flip(path / "manifest.ocdbt", 40)


def remove_all(path: Path) -> None:
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (drop_integrity, "unchecked"),
        (unseal, "unchecked"),
        (add_a_file, "unchecked"),
        (lose_integrity, "damaged"),
        (add_a_document, "damaged"),
        (change_a_document, "damaged"),
        (break_integrity, "damaged"),
        (lead_out, "damaged"),
        (break_manifest, "damaged"),
        (remove_all, "absent"),
    ],
)
def test_what_cannot_be_checked_is_reported_apart_from_damage(
    copy: Path, change: Callable[[Path], None], status: str
) -> None:
    change(copy)

    found = verify(copy)

    assert (found.status, found.intact) == (status, False)
    assert str(copy) in found.findings[0].file


@pytest.mark.parametrize("name", ["_METADATA", "_sharding", "_strings.json", "_CHECKPOINT_METADATA"])
def test_a_flipped_bit_in_a_document_is_found(copy: Path, name: str) -> None:
    flip(copy / name, 3)

    found = verify(copy)

    assert found.status == "damaged"
    assert {Path(damage.file).name for damage in found.damages} == {name}


def test_safetensors_of_ours_and_of_others(tmp_path: Path) -> None:
    penstock.sync.export_safetensors({"a": np.ones(1), "b": np.ones(0)}, tmp_path / "x.safetensors")
    save_file({"a": np.ones(1)}, tmp_path / "y.safetensors")

    ours, theirs = verify(tmp_path / "x.safetensors"), verify(tmp_path / "y.safetensors")

    assert (ours.status, ours.n_leaves, ours.n_ranges, ours.n_documents) == ("intact", 2, 1, 1)
    assert (theirs.status, theirs.n_leaves) == ("unchecked", 1)
    assert "records no checksums" in theirs.findings[0].problem


def test_a_tree_without_arrays(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "c", {"a": None, "s": "x"})

    assert verify(tmp_path / "c").intact


@pytest.mark.anyio
async def test_verifying_holds_little_memory_and_gives_it_back(saved: Path) -> None:
    async with penstock.Checkpointer(memory_limit=1 << 20) as checkpointer:
        assert (await checkpointer.verify(saved)).intact
        statistics = checkpointer.statistics()

    assert statistics.leased == 0
    assert 0 < statistics.peak <= 1 << 20


@pytest.mark.anyio
async def test_a_cancelled_verify_gives_back_its_memory(saved: Path) -> None:
    store = FaultyStore(LocalStore())
    hang = store.hang_on("open_data_file", 1)
    async with penstock.Checkpointer(store=store) as checkpointer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checkpointer.verify, saved)
            await hang.wait_reached()
            tasks.cancel_scope.cancel()
            hang.release()

        assert checkpointer.statistics().leased == 0

    assert store.open_files == 0


def test_an_empty_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    found = verify(tmp_path)

    assert (found.status, found.checkpoints) == ("absent", ())
    assert found.findings[0].problem == "there is no checkpoint"


ITEMS: Any = every_item({"a": np.arange(1000.0), "b": [np.ones(50)]})


@pytest.fixture(scope="module")
def saved_items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("items") / "ckpt"
    penstock.sync.save(path, ITEMS, custom_metadata={"who": "me"})
    return path


@pytest.fixture(scope="module")
def saved_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps") / "run"
    with penstock.sync.CheckpointManager(root, metadata={"run": 7}) as manager:
        for step in range(3):
            manager.save(step, {"a": np.full(1000, step)}, metrics={"loss": step})

    return root


class TestItems:
    @pytest.fixture
    def saved(self, saved_items: Path) -> Path:
        return saved_items

    def test_every_item_is_compared(self, saved: Path) -> None:
        found = verify(saved)

        assert found.intact, found.findings
        assert found.checkpoints == (str(saved),)
        assert found.nbytes == 8000 + 400 + 72 + 8 + 624 * 4 + 3 * 8

    @pytest.mark.parametrize("item", ["state", "scale", "key", "shuffle"])
    def test_damage_in_any_item_is_found(self, copy: Path, item: str) -> None:
        recorded = next((copy / item).rglob("_PENSTOCK_INTEGRITY")).parent
        flip(data_file(recorded), 0)

        found = verify(copy)

        assert found.status == "damaged"
        assert len(found.damages) == 1
        assert found.damages[0].file.startswith(str(copy / item))

    def test_an_item_can_be_compared_alone(self, copy: Path) -> None:
        flip(data_file(copy / "state"), 0)

        assert not penstock.sync.verify(copy, item="state").intact
        assert penstock.sync.verify(copy, item="scale").intact
        assert penstock.sync.verify(copy, item="other").status == "absent"

    def test_a_lost_item_is_damage(self, copy: Path) -> None:
        shutil.rmtree(copy / "scale")

        found = verify(copy)

        assert {(damage.file, damage.problem) for damage in found.damages} == {
            (str(copy / "scale"), "is missing, and _CHECKPOINT_METADATA lists it"),
            (str(copy / "scale" / "_PENSTOCK_INTEGRITY"), "is missing, and was written"),
        }

    def test_files_of_an_unknown_item_are_named(self, copy: Path) -> None:
        (copy / "theirs").mkdir()
        (copy / "theirs" / "state.npz").write_bytes(b"x")

        found = verify(copy)

        assert found.status == "unchecked"
        assert [finding.file for finding in found.unchecked] == [str(copy / "theirs" / "state.npz")]


class TestSteps:
    @pytest.fixture
    def saved(self, saved_steps: Path) -> Path:
        return saved_steps

    def test_every_step_is_compared(self, saved: Path) -> None:
        found = verify(saved)

        assert found.intact, found.findings
        assert found.checkpoints == tuple(str(saved / str(step)) for step in range(3))
        assert found.nbytes == 3 * 8000

    @pytest.mark.parametrize("step", [0, 1, 2])
    def test_damage_in_any_step_is_found(self, copy: Path, step: int) -> None:
        flip(data_file(copy / str(step) / "default"), 0)

        found = verify(copy)

        assert found.status == "damaged"
        assert found.damages[0].file.startswith(str(copy / str(step)))

    def test_a_folder_of_runs_is_compared_as_a_whole(self, copy: Path) -> None:
        runs = copy.parent / "runs"
        shutil.move(copy, runs / "a")
        penstock.sync.save(runs / "flat", {"a": np.ones(3)})
        (runs / "train.log").write_text("not a part of any checkpoint")
        (runs / "plots").mkdir()
        (runs / "plots" / "settings.json").write_text("{}")

        found = verify(runs)

        assert found.intact, found.findings
        assert len(found.checkpoints) == 4

    def test_a_step_of_which_nothing_is_known_is_named(self, copy: Path) -> None:
        (copy / "3" / "state").mkdir(parents=True)
        (copy / "3" / "state" / "mine.npz").write_bytes(b"x")

        found = verify(copy)

        assert found.status == "unchecked"
        assert [finding.file for finding in found.unchecked] == [str(copy / "3")]

    @pytest.mark.parametrize(
        "file", ["2/metrics/metrics", "2/_CHECKPOINT_METADATA", "metadata/_ROOT_METADATA"]
    )
    def test_a_flipped_bit_in_metrics_or_metadata_is_found(self, copy: Path, file: str) -> None:
        flip(copy / file, 3)

        assert {damage.file for damage in verify(copy).damages} == {str(copy / file)}

    def test_what_an_interrupted_save_left_is_told_apart(self, copy: Path) -> None:
        shutil.copytree(copy / "2", copy / "3.orbax-checkpoint-tmp")

        found = verify(copy)

        assert found.intact
        assert found.leftovers == (str(copy / "3.orbax-checkpoint-tmp"),)
        assert verify(copy / "3.orbax-checkpoint-tmp").status == "absent"
        assert verify(copy / "3").status == "absent"

    @pytest.mark.parametrize("at", [1, 2, 3])
    def test_a_medium_that_refuses_to_read_is_no_damage(self, saved: Path, at: int) -> None:
        store = FaultyStore(LocalStore())
        store.fail_on("file.read_at", at)
        with penstock.sync.Checkpointer(store=store) as checkpointer:
            found = checkpointer.verify(saved)

        assert found.status == "unreadable"
        assert not found.damages
        assert store.open_files == 0

    def test_a_link_to_a_folder_above_ends(self, copy: Path) -> None:
        (copy / "again").symlink_to(copy, target_is_directory=True)

        assert verify(copy).status == "intact"


@pytest.mark.anyio
async def test_a_step_that_is_deleted_meanwhile_is_no_damage(saved_steps: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(saved_steps, tmp_path / "run"))
    store = FaultyStore(LocalStore())
    hang = store.hang_on("open_data_file", 1)
    found: list[VerifyReport] = []

    async with penstock.Checkpointer(store=store) as checkpointer, anyio.create_task_group() as tasks:

        async def check() -> None:
            found.append(await checkpointer.verify(root))

        tasks.start_soon(check)
        await hang.wait_reached()
        shutil.rmtree(root / "0")
        hang.release()

    assert found[0].intact, found[0].findings
    assert found[0].checkpoints == (str(root / "1"), str(root / "2"))


def test_files_of_third_parties_handlers_are_named(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    penstock.sync.save(tmp_path / "c", {"a": np.ones(3)}, overwrite=True)
    (tmp_path / "c" / "theirs").mkdir()
    (tmp_path / "c" / "theirs" / "leaf.npy").write_bytes(b"x")

    found = verify(tmp_path / "c")

    assert (found.status, [finding.file for finding in found.unchecked]) == (
        "unchecked",
        [str(tmp_path / "c" / "theirs" / "leaf.npy")],
    )
    assert "theirs" in str(found.unchecked[0])
