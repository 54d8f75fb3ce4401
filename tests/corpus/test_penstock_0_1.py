"""What penstock 0.1 wrote comes back bit for bit: every layout, codec, kind of leaf and item, and manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.corpus.corpora import PENSTOCK_0_1, unpacked_penstock_0_1
from tests.corpus.described_trees import Vocabulary, VocabularyHandler, rebuild

import penstock
import penstock.orbax
from penstock.handlers import default_handlers

AssertSame = Callable[[Any, Any], None]
case = pytest.mark.parametrize("case", PENSTOCK_0_1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked_penstock_0_1(tmp_path_factory) / "penstock_0_1"


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    registry = default_handlers()
    registry.register(Vocabulary, VocabularyHandler())
    with penstock.sync.Checkpointer(registry=registry) as checkpointer:
        yield checkpointer


@pytest.mark.thinned(3)
@case
def test_a_checkpoint_comes_back_as_the_code_that_wrote_it_restored_it(
    case: str, folder: Path, ours: Any, assert_same: AssertSame
) -> None:
    about = PENSTOCK_0_1[case]

    found = ours.restore(folder / about["path"], **about["options"])

    assert_same(found, rebuild(about["found"]))


@pytest.mark.thinned(3)
@case
def test_a_checkpoint_comes_back_as_the_tree_that_was_saved(
    case: str, folder: Path, ours: Any, assert_same: AssertSame
) -> None:
    about = PENSTOCK_0_1[case]
    saved = rebuild(about["saved"])
    item = {key: value for key, value in about["options"].items() if key == "item"}

    found = ours.restore(folder / about["path"], like=saved, **item)

    assert_same(found, saved)


@pytest.mark.thinned(3)
@case
def test_a_checkpoint_can_be_mapped(case: str, folder: Path, ours: Any) -> None:
    about = PENSTOCK_0_1[case]

    found = ours.restore(folder / about["path"], mmap=True, **about["options"])

    assert list(map(bits, jax.tree.leaves(found))) == list(
        map(bits, jax.tree.leaves(rebuild(about["found"])))
    )


def bits(leaf: Any) -> object:
    """What a leaf holds, wherever it lies."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, str | Vocabulary):
        return leaf

    array = np.asarray(leaf)
    return array.dtype, array.shape, array.tobytes()


@case
def test_metadata_says_the_same_as_then(case: str, folder: Path, ours: Any) -> None:
    about = PENSTOCK_0_1[case]

    found = ours.metadata(folder / about["path"], item=about["options"].get("item"))

    leaves = [(leaf.name, leaf.kind, leaf.dtype, leaf.shape) for leaf in found.leaves]
    assert leaves == [
        (name, kind, dtype, None if shape is None else tuple(shape))
        for name, kind, dtype, shape in about["leaves"]
    ]
    assert found.custom_metadata == about["custom_metadata"]


def test_all_items_come_back_together(folder: Path, ours: Any, assert_same: AssertSame) -> None:
    names = ["state", "ema", "config", "scale", "key", "shuffle", "message"]
    expected = {name: rebuild(PENSTOCK_0_1[f"items-{name}"]["found"]) for name in names}
    expected["scale"] = expected["scale"]["checkpoint"]

    assert_same(ours.restore_items(folder / "items"), expected)


@pytest.mark.parametrize("case", [name for name, about in PENSTOCK_0_1.items() if about["n_ranges"]])
def test_checksums_of_then_are_right(case: str, folder: Path, ours: Any) -> None:
    about = PENSTOCK_0_1[case]

    report = ours.verify(folder / about["path"], item=about["options"].get("item"))

    assert not report.damages
    assert report.n_ranges == about["n_ranges"] * len(report.checkpoints)  # of a run, every step counts


def test_a_manager_finds_the_steps_and_their_metrics(folder: Path) -> None:
    with penstock.sync.CheckpointManager(folder / "manager", read_only=True) as manager:
        assert list(manager.all_steps()) == [1, 2, 5]
        assert manager.best_step("loss") == 5
        assert manager.best_step("loss", "max") == 1
        about = manager.metadata(2)
        assert (about.metrics, about.custom_metadata) == ({"loss": 0.5}, {"at": 2})
        assert manager.root_metadata() == {"run": 7}
        assert manager.restore(2)["step"] == 2

    names = penstock.steps.StepNames("ckpt", 5)
    with penstock.sync.CheckpointManager(folder / "manager-items", names=names, read_only=True) as manager:
        found = manager.restore(5)
        assert (found["params"]["step"], found["config"]) == (5, {"lr": 5})


def test_a_manager_of_the_orbax_face_finds_the_steps_and_their_metrics(folder: Path) -> None:
    ocp = penstock.orbax
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], read_only=True)
    for name, metadata in {"v0-manager": {"run": 8}, "manager": {"run": 7}}.items():
        with ocp.CheckpointManager(folder / name, options=options) as manager:
            assert list(manager.all_steps()) == [1, 2, 5]
            assert manager.best_step() == 1
            assert manager.metrics(2) == {"loss": 0.5}
            assert manager.restore(5, args=ocp.args.StandardRestore())["step"] == 5
            assert manager.metadata().custom_metadata == metadata
