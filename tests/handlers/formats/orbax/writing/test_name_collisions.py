"""Names under which arrays can lie in directories, and collisions that are refused with both key paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest

import penstock
from penstock import SaveFormat
from penstock.errors import DuplicateNameError, InvalidLeafError

ZARRS: tuple[Literal[2, 3], ...] = (2, 3)


def save(path: Path, tree: object, zarr: Literal[2, 3] = 2, **options: Any) -> None:
    with penstock.sync.Checkpointer(
        save_format=SaveFormat(ocdbt=False, zarr=zarr, **options)
    ) as checkpointer:
        checkpointer.save(path, tree).result()


def show(tree: Any) -> str:
    """Order of keys does not matter."""
    return str(jax.tree.map(str, tree))


def assert_nothing_was_written(path: Path) -> None:
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("zarr", ZARRS)
@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": np.ones(2)}, "a/b": np.ones(3), "ü ñ 漢": 1.5, "with space": 2},
        {"x/y/z": np.ones(2), "x/y": {"q": np.ones(3)}},
        {"c": np.ones((2, 2)), "d": 1, "~": 2, "%2F": 3, "A": 5, "a b\n": 6},
        {"s/t": "strings lie in no directory", "checkpoint": "neither"},
        np.ones((2, 3)),
        {"n" * 255: 1},
    ],
)
def test_names_that_can_be_paths(tmp_path: Path, tree: Any, zarr: Literal[2, 3]) -> None:
    save(tmp_path / "ckpt", tree, zarr)

    assert show(penstock.sync.restore(tmp_path / "ckpt", like=tree)) == show(tree)


@pytest.mark.parametrize("zarr", ZARRS)
@pytest.mark.parametrize(
    "name",
    [
        *(
            "..",
            ".",
            "a/../b",
            "/a",
            "a/",
            "a//b",
            "a\0b",
            "a\\b",
            "/",
            "n" * 256,
            "漢" * 86,
            "x.orbax-checkpoint-tmp",
        ),
        *("_METADATA", "_sharding", "array_metadatas", "manifest.ocdbt", "checkpoint", "_strings.json"),
        *("a/_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint"),
        *("_PENSTOCK_INTEGRITY", "_PENSTOCK_STAGES"),
    ],
    ids=repr,
)
def test_names_that_cannot_be_directories_are_refused(tmp_path: Path, name: str, zarr: Literal[2, 3]) -> None:
    tree = {"good": np.ones(2), name: np.ones(2)}

    with pytest.raises(InvalidLeafError, match="ocdbt=True") as caught:
        save(tmp_path / "ckpt", tree, zarr)

    assert caught.value.key_path == f"[{name!r}]"
    assert_nothing_was_written(tmp_path)


@pytest.mark.parametrize(
    ("tree", "zarr", "both"),
    [
        # The directory of one is the file of a chunk of the other, or of its metadata.
        ({"a": np.ones(2), "a/0": np.ones(2)}, 2, {"['a']", "['a/0']"}),
        ({"a": np.ones((2, 2)), "a/0": {"0": np.ones(2)}}, 2, {"['a']", "['a/0']['0']"}),
        ({"a": np.ones(2), "a/.zarray": np.ones(2)}, 2, {"['a']", "['a/.zarray']"}),
        ({"a": np.ones(2), "a/zarr.json": np.ones(2)}, 3, {"['a']", "['a/zarr.json']"}),
        ({"a": np.ones(()), "a/c": np.ones(2)}, 3, {"['a']", "['a/c']"}),
        ({"a": np.ones(2), "a/c/0": np.ones(2)}, 3, {"['a']", "['a/c/0']"}),
        # Two names that are one, whatever the layout.
        ({"a.b": np.ones(2), "a": {"b": np.ones(2)}}, 2, {"['a.b']", "['a']['b']"}),
    ],
)
def test_collisions_are_refused_with_both_key_paths(
    tmp_path: Path, tree: object, zarr: Literal[2, 3], both: set[str]
) -> None:
    with pytest.raises(DuplicateNameError) as caught:
        save(tmp_path / "ckpt", tree, zarr)

    assert all(key_path in str(caught.value) for key_path in both)
    assert_nothing_was_written(tmp_path)


@pytest.mark.parametrize(
    ("tree", "zarr"),
    [
        ({"a": np.ones(2), "a/1": np.ones(2)}, 2),
        ({"a": np.ones(2), "a/zarr.json": np.ones(2)}, 2),
        ({"a": np.ones(2), "a/0": np.ones(2)}, 3),
        ({"a": np.ones(2), "a/c": np.ones(2)}, 3),
    ],
)
def test_what_only_looks_like_a_collision_is_none(tmp_path: Path, tree: Any, zarr: Literal[2, 3]) -> None:
    save(tmp_path / "ckpt", tree, zarr)
    assert show(penstock.sync.restore(tmp_path / "ckpt")) == show(tree)


def test_with_more_chunks_there_are_more_collisions(tmp_path: Path) -> None:
    tree = {"a": np.ones(2), "a/1": np.ones(2)}
    with pytest.raises(DuplicateNameError, match="'a/1'"):
        save(tmp_path / "ckpt", tree, chunk_byte_size=8)
