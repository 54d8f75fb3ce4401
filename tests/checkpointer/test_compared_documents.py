"""A changed or lost document is found wherever it is read, and what others rewrite by right is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from docs.examples.stages_of_your_own import Quantise
from tests.unsealed import unseal

import penstock
from penstock import SaveFormat
from penstock.errors import ChecksumError, CorruptCheckpointError, MissingFileError
from penstock.items import Array, Composite, Json, NumpyRandomKey, PyTree, RandomKey
from penstock.pipelines import save_pipeline

TREE = {"a": np.arange(10), "key": jax.random.key(1), "text": "words"}
ITEMS = Composite(
    state=PyTree(TREE, {"epoch": 3}),
    config=Json({"layers": 12}),
    bare=Array(np.arange(4.0)),
    rng=RandomKey(jax.random.key(1)),
    numpy=NumpyRandomKey(np.random.RandomState(0).get_state()),
)


def change(file: Path) -> None:
    """Change the last digit in a document, or else a letter."""
    data = bytearray(file.read_bytes())
    at = max([at for at, byte in enumerate(data) if chr(byte).isdigit()] or [len(data) // 2])
    data[at] ^= 1
    file.write_bytes(data)


def lose(file: Path) -> None:
    file.unlink()


def save(path: Path, **form: Any) -> Path:
    with penstock.sync.Checkpointer(save_format=SaveFormat(**form)) as checkpointer:
        checkpointer.save(path, TREE, custom_metadata={"lr": 0.5}).result()

    return path


@pytest.mark.thinned(2)
@pytest.mark.parametrize("do", [change, lose])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("_METADATA", {}),
        ("_sharding", {}),
        ("_strings.json", {}),
        ("_CHECKPOINT_METADATA", {}),
        ("_PENSTOCK_INTEGRITY", {}),
        ("array_metadatas/process_0", {}),
        ("a/.zarray", {"ocdbt": False}),
        ("a/zarr.json", {"ocdbt": False, "zarr": 3}),
    ],
)
def test_documents_of_a_tree_are_compared(
    name: str, form: dict[str, Any], do: Callable[[Path], None], tmp_path: Path
) -> None:
    path = save(tmp_path / "c", **form)
    do(path / name)

    for read in (penstock.sync.restore, penstock.sync.metadata):
        with pytest.raises(CorruptCheckpointError, match=name.split("/")[0]):
            read(path)
    assert penstock.sync.verify(path).status == "damaged"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("do", [change, lose])
@pytest.mark.parametrize(
    "name",
    [
        "_CHECKPOINT_METADATA",
        "_PENSTOCK_INTEGRITY",
        "state/_METADATA",
        "state/_PENSTOCK_INTEGRITY",
        "config/metadata",
        "bare/_METADATA",
        "rng/jax_random_key_metadata/metadata",
        "numpy/np_random_key_metadata/metadata",
    ],
)
def test_documents_of_items_are_compared(name: str, do: Callable[[Path], None], tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "c", ITEMS, custom_metadata={"lr": 0.5})
    do(tmp_path / "c" / name)

    with pytest.raises(CorruptCheckpointError):
        penstock.sync.restore_items(tmp_path / "c")
    assert penstock.sync.verify(tmp_path / "c").status == "damaged"


@pytest.mark.parametrize("do", [change, lose])
def test_documents_of_an_item_that_is_opened_by_its_path_are_compared(
    do: Callable[[Path], None], tmp_path: Path
) -> None:
    penstock.sync.save(tmp_path / "c", ITEMS)
    do(tmp_path / "c" / "state" / "_PENSTOCK_INTEGRITY")
    change(tmp_path / "c" / "config" / "metadata")

    for item in ("state", "config"):
        with pytest.raises(CorruptCheckpointError):
            penstock.sync.restore(tmp_path / "c" / item)


@pytest.mark.parametrize("do", [change, lose])
def test_documents_of_a_step_are_compared(do: Callable[[Path], None], tmp_path: Path) -> None:
    with penstock.sync.CheckpointManager(tmp_path, metadata={"project": 1}) as manager:
        saved = manager.save(1, TREE, metrics={"loss": 0.25})
        assert saved is not None
        saved.result()
        do(tmp_path / "1" / "metrics" / "metrics")
        with pytest.raises(CorruptCheckpointError):
            manager.metadata(1)

    change(tmp_path / "metadata" / "_ROOT_METADATA")
    with pytest.raises(ChecksumError, match="_ROOT_METADATA"):
        penstock.sync.metadata(tmp_path)


@pytest.mark.parametrize("do", [change, lose])
@pytest.mark.parametrize("name", ["_ROOT_METADATA", "_PENSTOCK_INTEGRITY"])
def test_documents_of_a_root_are_compared(name: str, do: Callable[[Path], None], tmp_path: Path) -> None:
    with penstock.sync.CheckpointManager(tmp_path, metadata={"project": 1}) as manager:
        saved = manager.save(1, TREE)
        assert saved is not None
        saved.result()
    assert penstock.sync.verify(tmp_path).intact

    do(tmp_path / "metadata" / name)

    assert penstock.sync.verify(tmp_path).status == "damaged"
    with pytest.raises(CorruptCheckpointError):
        penstock.sync.metadata(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("items", [False, True])
async def test_documents_of_what_stages_did_are_compared(items: bool, tmp_path: Path) -> None:
    pipeline = save_pipeline().insert_after("device_to_host", Quantise())
    async with penstock.Checkpointer() as checkpointer:
        tree = {"a": np.zeros(10, np.float32)}
        saved = Composite(state=PyTree(tree)) if items else tree
        await (await checkpointer.save(tmp_path / "c", saved, pipeline=pipeline))
        assert (await checkpointer.verify(tmp_path / "c")).intact
        (file,) = (tmp_path / "c").rglob("_PENSTOCK_STAGES")
        change(file)
        report = await checkpointer.verify(tmp_path / "c")

    assert (report.status, [finding.file for finding in report.findings]) == ("damaged", [str(file)])


def test_an_item_that_was_deleted_by_right_is_not_missed(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "c", Composite(state=PyTree(TREE), config=Json(1), other=Json(2)))
    file = tmp_path / "c" / "_CHECKPOINT_METADATA"
    document = json.loads(file.read_bytes())
    del document["item_handlers"]["other"]  # as Orbax rewrites it
    file.write_text(json.dumps(document, indent=1))
    shutil.rmtree(tmp_path / "c" / "other")

    assert penstock.sync.restore_items(tmp_path / "c").keys() == {"state", "config"}
    assert penstock.sync.verify(tmp_path / "c").intact

    document["custom_metadata"]["lr"] = 1
    file.write_text(json.dumps(document))
    with pytest.raises(ChecksumError, match="_CHECKPOINT_METADATA"):
        penstock.sync.restore_items(tmp_path / "c")


def test_what_the_first_penstock_wrote_opens_as_before(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    unseal(path)
    (path / "_sharding").unlink()

    assert penstock.sync.restore(path)["text"] == "words"
    report = penstock.sync.verify(path)
    assert report.status == "unchecked"
    assert any("no digests of its documents" in finding.problem for finding in report.unchecked)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax reads what is recorded
def test_the_commit_mark_is_free_text_but_for_its_digest(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    mark = path / "commit_success.txt"
    text = mark.read_text()
    assert text.startswith("Checkpoint commit was successful\n_PENSTOCK_INTEGRITY: ")

    mark.write_text(text.replace("successful", "as it should be"))
    penstock.sync.restore(path)
    mark.unlink()
    penstock.sync.restore(path)
    assert np.asarray(ocp.PyTreeCheckpointer().restore(path)["a"]).tolist() == list(range(10))


def test_a_lost_record_names_itself(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    (path / "_PENSTOCK_INTEGRITY").unlink()

    with pytest.raises(MissingFileError, match="_PENSTOCK_INTEGRITY"):
        penstock.sync.restore(path)
