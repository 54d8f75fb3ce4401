"""Several items in one checkpoint with leaves that only a third party's handler knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from tests.stages.stage_rig import Parcel, ParcelHandler, files_in, with_parcels

import penstock
from penstock import SaveFormat
from penstock.errors import HandlerFailedError
from penstock.handlers import Composite, default_handlers
from penstock.items import Json, PyTree

ARRAYS = {"w": np.arange(6.0), "b": np.ones(2, np.int8)}
FORMATS = {"ocdbt": SaveFormat(), "directories": SaveFormat(ocdbt=False)}


def items() -> Composite:
    """Two trees with third-party leaves of the same names, and one tree without such leaves."""
    return Composite(
        one={"p": Parcel("first"), "deep": [Parcel("below")], "x": np.arange(3)},
        two=PyTree({"p": Parcel("second"), "x": np.arange(4)}, custom_metadata={"by": "them"}),
        arrays=ARRAYS,
        config=Json({"lr": 0.1}),
    )


def checkpointer(handler: ParcelHandler, form: SaveFormat | None = None) -> penstock.sync.Checkpointer:
    registry = with_parcels(default_handlers(entry_points=False), handler)
    return penstock.sync.Checkpointer(registry=registry, save_format=form)


def texts(tree: Any) -> Any:
    """Return the tree with parcels as strings and arrays as lists, for comparisons."""
    match tree:
        case dict():
            return {key: texts(value) for key, value in tree.items()}
        case list():
            return [texts(value) for value in tree]
        case Parcel():
            return tree.text
        case _:
            return tree.tolist()


@pytest.mark.parametrize("form", FORMATS)
def test_files_of_a_third_party_are_in_the_directory_of_their_item(tmp_path: Path, form: str) -> None:
    handler = ParcelHandler()
    with checkpointer(handler, FORMATS[form]) as opened:
        opened.save(tmp_path / "ckpt", items()).result()

    written = files_in(tmp_path / "ckpt")
    assert {name for name in written if name.rpartition("/")[2] in {"p", "deep.0"}} == {
        "one/p",
        "one/deep.0",
        "two/p",
    }
    building = tmp_path / "ckpt.orbax-checkpoint-tmp"
    assert sorted(handler.finalized) == [str(building / "one"), str(building / "two")]


@pytest.mark.parametrize("form", FORMATS)
def test_leaves_of_a_third_party_are_restored_from_the_directory_of_their_item(
    tmp_path: Path, form: str
) -> None:
    with checkpointer(ParcelHandler(), FORMATS[form]) as opened:
        opened.save(tmp_path / "ckpt", items()).result()
        (tmp_path / "ckpt").rename(tmp_path / "moved")
        found = opened.restore_items(tmp_path / "moved")

        assert found.pop("config") == {"lr": 0.1}
        assert texts(found) == {
            "one": {"p": "first", "deep": ["below"], "x": [0, 1, 2]},
            "two": {"p": "second", "x": [0, 1, 2, 3]},
            "arrays": texts(ARRAYS),
        }
        assert opened.metadata(tmp_path / "moved", item="two").tree_custom_metadata == {"by": "them"}


def test_one_item_of_a_third_party_is_restored_onto_a_target_and_in_part(tmp_path: Path) -> None:
    with checkpointer(ParcelHandler()) as opened:
        opened.save(tmp_path / "ckpt", items()).result()

        like = {"p": Parcel, "x": np.zeros(4, int)}
        assert texts(opened.restore(tmp_path / "ckpt", item="two", like=like)) == {
            "p": "second",
            "x": [0, 1, 2, 3],
        }
        assert texts(opened.restore(tmp_path / "ckpt", item="one", only="deep")) == {"deep": ["below"]}
        assert texts(opened.restore(tmp_path / "ckpt" / "one", only="p")) == {"p": "first"}


def test_a_single_tree_among_items_has_its_files_in_its_directory(tmp_path: Path) -> None:
    handler = ParcelHandler()
    with checkpointer(handler) as opened:
        saved = Composite(state={"p": Parcel("x"), "w": np.ones(2)}, config=Json(1))
        opened.save(tmp_path / "ckpt", saved).result()
        found = opened.restore_items(tmp_path / "ckpt")

    assert texts(found["state"]) == {"p": "x", "w": [1.0, 1.0]}
    assert "state/p" in files_in(tmp_path / "ckpt")
    assert handler.finalized == [str(tmp_path / "ckpt.orbax-checkpoint-tmp" / "state")]


def test_an_item_of_nothing_else(tmp_path: Path) -> None:
    with checkpointer(ParcelHandler()) as opened:
        saved = Composite(one={"p": Parcel("x")}, two={"q": Parcel("y")})
        opened.save(tmp_path / "ckpt", saved).result()

        found = opened.restore_items(tmp_path / "ckpt")
        assert texts(found) == {"one": {"p": "x"}, "two": {"q": "y"}}


def test_steps_of_several_items(tmp_path: Path) -> None:
    registry = with_parcels(default_handlers(entry_points=False), ParcelHandler())
    with penstock.sync.CheckpointManager(tmp_path / "run", registry=registry) as manager:
        for step in (1, 2):
            saved = Composite(one={"p": Parcel(f"a{step}")}, two={"p": Parcel(f"b{step}")})
            manager.save(step, saved, metrics={"loss": 1.0})

        manager.wait()
        assert texts(dict(manager.restore(1)))["one"] == {"p": "a1"}
        assert texts(manager.restore(2, item="two")) == {"p": "b2"}


def test_what_fails_names_the_leaf_by_its_whole_path(tmp_path: Path) -> None:
    handler = ParcelHandler()
    handler.fail("write", "deep.0")
    with (
        checkpointer(handler) as opened,
        pytest.raises(HandlerFailedError, match=r"\['one'\]\['deep'\]\[0\]"),
    ):
        opened.save(tmp_path / "ckpt", items()).result()

    assert list(tmp_path.iterdir()) == []


def test_orbax_reads_the_rest(tmp_path: Path) -> None:
    with checkpointer(ParcelHandler()) as opened:
        opened.save(tmp_path / "ckpt", items()).result()

    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        wanted = ocp.args.Composite(
            arrays=ocp.args.PyTreeRestore(),
            config=ocp.args.JsonRestore(),
            two=ocp.args.PyTreeRestore(item={"x": 0}, partial_restore=True),
        )
        found = orbax.restore(tmp_path / "ckpt", args=wanted)

    assert texts(found["arrays"]) == texts(ARRAYS)
    assert found["config"] == {"lr": 0.1}
    assert texts(found["two"]) == {"x": [0, 1, 2, 3]}
    stored = json.loads((tmp_path / "ckpt" / "one" / "_METADATA").read_bytes())["tree_metadata"]
    assert {about["value_metadata"]["value_type"] for about in stored.values()} == {"parcel", "np.ndarray"}
