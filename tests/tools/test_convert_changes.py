"""A conversion gives leaves other names and other dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import penstock

SMALL_PIECES = penstock.Config.load(environ={}, arguments={"save": {"piece_bytes": "40KiB"}})
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TREE: dict[str, Any] = {
    "layers": [{"w": np.linspace(-3, 300, 50_000).reshape(50, 1000)}, {"w": np.ones((3, 2), np.float32)}],
    "empty": np.zeros((0, 4)),
    "alone": np.array(2.5),
    "ids": np.arange(7),
    "step": 3,
    "name": "run",
}


@pytest.fixture(params=["plain", "coded", "directories", "safetensors"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "source"
    if request.param == "safetensors":
        penstock.sync.export_safetensors(TREE, path)
        return path

    form = {
        "plain": penstock.SaveFormat(),
        "coded": penstock.SaveFormat(codec="zstd:1"),
        "directories": penstock.SaveFormat(ocdbt=False, zarr=3),
    }[request.param]
    with penstock.sync.Checkpointer(save_format=form, config=SMALL_PIECES) as checkpointer:
        checkpointer.save(path, TREE).result()

    return path


@pytest.mark.parametrize("memory", ["1GiB", "100KiB"])
@pytest.mark.parametrize("codec", ["none", "zstd:1"])
def test_a_conversion_changes_names_and_dtypes(source: Path, tmp_path: Path, memory: str, codec: str) -> None:
    report = penstock.sync.convert(
        source,
        tmp_path / "result",
        rename={"layers.0": "first", "ids": None, "['alone']": "deep.alone"},
        dtype=np.float32 if codec == "none" else {"first.*": BFLOAT16, "deep.alone": "int8"},
        save_format=penstock.SaveFormat(codec=codec),
        memory_limit=memory,
    )

    found = penstock.sync.restore(tmp_path / "result")
    assert sorted(found) == ["deep", "empty", "first", "layers", "name", "step"]
    wide, alone = (np.float32, np.float32) if codec == "none" else (BFLOAT16, np.int8)
    np.testing.assert_array_equal(found["first"]["w"], TREE["layers"][0]["w"].astype(wide))
    np.testing.assert_array_equal(found["deep"]["alone"], TREE["alone"].astype(alone))
    assert (found["first"]["w"].dtype, found["deep"]["alone"].dtype) == (wide, alone)
    assert found["empty"].shape == (0, 4)
    assert (found["step"], found["name"]) == (3, "run")
    if codec == "none":  # else it is what was written
        assert report.nbytes == penstock.sync.metadata(tmp_path / "result").nbytes
    assert penstock.sync.verify(tmp_path / "result").intact


def test_a_conversion_into_safetensors_changes_names_and_dtypes(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "source", TREE)
    target = tmp_path / "m.safetensors"
    penstock.sync.convert(tmp_path / "source", target, rename={"layers": "model.layers"}, dtype="float16")

    found = penstock.sync.restore(target)
    assert found["model.layers.1.w"].dtype == np.float16
    assert found["ids"].dtype == np.int64  # one dtype is for arrays of its kind


def test_each_tree_of_a_run_gets_the_names_and_each_rule_must_name_a_leaf_of_one(tmp_path: Path) -> None:
    with penstock.sync.CheckpointManager(tmp_path / "run") as manager:
        items = penstock.items.Composite(model={"a": np.ones(2)}, optimizer={"b": np.ones(3)})
        manager.save(1, items, metrics={"loss": 1})

    penstock.sync.convert(tmp_path / "run", tmp_path / "new", rename={"a": "x.a", "b": "x.b"})
    model = penstock.sync.metadata(tmp_path / "new" / "1", item="model")
    assert [leaf.key_path for leaf in model.leaves] == ["['x']['a']"]
    with pytest.raises(penstock.errors.SpecError, match="'c': rename names it, but no stored leaf"):
        penstock.sync.convert(tmp_path / "run", tmp_path / "other", rename={"a": "x", "c": "y"})
    assert not list((tmp_path / "other").glob("*"))


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"rename": {"layes": "x"}}, "'layes': rename names it, but no stored leaf has this name"),
        ({"rename": {"ids": "step"}}, "would both be restored as 'step'"),
        ({"rename": {"ids": "step.ids"}}, "would lie within the leaf"),
        ({"rename": {"ids": 3}}, "neither a dotted string nor a tuple of strings"),
        ({"dtype": {"layers.2.*": "int8"}}, "dtype names 'layers.2.*', but no leaf has such a name"),
        ({"dtype": "floot"}, "'floot' is not a dtype"),
        ({"dtype": "like"}, "a conversion has no target"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    asked: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    penstock.sync.save(tmp_path / "source", TREE)

    with pytest.raises(penstock.errors.SpecError, match=problem):
        penstock.sync.convert(tmp_path / "source", tmp_path / "result", **asked)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_imaginary_part_is_not_dropped(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "source", {"z": np.ones(3, np.complex64)})

    with pytest.raises(penstock.errors.SpecError, match=r"\['z'\]: cannot be cast from complex64 to float32"):
        penstock.sync.convert(tmp_path / "source", tmp_path / "result", dtype={"z": "float32"})
