"""What penstock.orbax writes has digests, and what it reads is compared with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import penstock
import penstock.orbax as ocp
import penstock.orbax.v1 as v1
from penstock.errors import ChecksumError, CorruptCheckpointError, InUseError
from penstock.handlers import LocalStore
from penstock.handlers.stores.publishing import temporary_path
from penstock.orbax.type_handlers import ArrayHandler, NumpyHandler, StringHandler

TREE: dict[str, Any] = {"a": np.arange(3000.0), "b": {"c": np.arange(5)}, "text": "words"}


def save_tree(path: Path) -> None:
    ocp.PyTreeCheckpointer().save(path, TREE)


def save_composite(path: Path) -> None:
    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(TREE),
        config=ocp.args.JsonSave({"lr": 0.5}),
        key=ocp.args.JaxRandomKeySave(jax.random.key(3)),
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args, custom_metadata={"run": 5})


def json_items() -> Any:
    """A context of v1 in which `config` is JSON."""
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, checkpointable_name="config")
    context = v1.Context()
    context.checkpointables.registry = registry
    return context


def save_v1(path: Path) -> None:
    with json_items():
        v1.save_checkpointables(path, {"state": TREE, "config": {"lr": 0.5}}, custom_metadata={"run": 5})


def save_step(path: Path) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["l"])
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(TREE))
    with ocp.CheckpointManager(path.parent, options=options) as manager:
        manager.save(int(path.name), args=args, metrics={"l": 1.25})


def restore_tree(path: Path) -> Any:
    return ocp.PyTreeCheckpointer().restore(path)


def restore_composite(path: Path) -> Any:
    args = ocp.args.Composite(
        state=ocp.args.PyTreeRestore(), config=ocp.args.JsonRestore(), key=ocp.args.JaxRandomKeyRestore()
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(path, args)
        return found.state, found.config, found.key, checkpointer.metadata(path).custom_metadata


def restore_v1(path: Path) -> Any:
    with json_items():
        return v1.load_checkpointables(path), v1.metadata(path).custom_metadata


def restore_step(path: Path) -> Any:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["l"])
    args = ocp.args.Composite(state=ocp.args.PyTreeRestore())
    with ocp.CheckpointManager(path.parent, options=options) as manager:
        return manager.restore(int(path.name), args=args).state, manager.metrics(int(path.name))


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "tree": (save_tree, restore_tree),
    "composite": (save_composite, restore_composite),
    "v1": (save_v1, restore_v1),
    "step": (save_step, restore_step),
}


def change(file: Path) -> None:
    """Change a digit or a letter near the middle, so that JSON stays JSON."""
    data = bytearray(file.read_bytes())
    at = next(
        at
        for at in sorted(range(len(data)), key=lambda at: abs(at - len(data) // 2))
        if chr(data[at]).isalnum() and chr(data[at] ^ 1).isalnum()
    )
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_has_a_digest(kind: str, tmp_path: Path) -> None:
    save, _ = KINDS[kind]
    save(tmp_path / "1")

    report = penstock.sync.verify(tmp_path / "1")

    assert (report.status, report.findings) == ("intact", ())
    assert report.n_documents > 1


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("tree", "_METADATA"),
        ("tree", "_strings.json"),
        ("composite", "state/_METADATA"),
        ("composite", "config/metadata"),
        ("composite", "key/jax_random_key_metadata/metadata"),
        ("composite", "_CHECKPOINT_METADATA"),
        ("v1", "state/_strings.json"),
        ("v1", "config/data.json"),
        ("v1", "_CHECKPOINT_METADATA"),
        ("step", "metrics/metrics"),
    ],
)
def test_a_changed_document_is_found(kind: str, file: str, tmp_path: Path) -> None:
    save, restore = KINDS[kind]
    save(tmp_path / "1")
    restore(tmp_path / "1")

    change(tmp_path / "1" / file)

    with pytest.raises(CorruptCheckpointError):
        restore(tmp_path / "1")
    assert penstock.sync.verify(tmp_path / "1").status == "damaged"


def test_an_item_that_is_deleted_by_right_is_not_missed(tmp_path: Path) -> None:
    save_v1(tmp_path / "1")

    assert v1.delete(tmp_path / "1", checkpointable_name="config")

    assert "state" in v1.load_checkpointables(tmp_path / "1")
    assert not penstock.sync.verify(tmp_path / "1").damages


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("handler", [NumpyHandler, ArrayHandler])
def test_a_type_handler_that_is_called_itself_compares(handler: Any, ocdbt: bool, tmp_path: Path) -> None:
    # Compressed, the numbers would take less room than the documents.
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_compression=False))
    checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave(TREE))
    (leaf,) = [ocp.type_handlers.ParamInfo(name="a", parent_dir=tmp_path / "c", is_ocdbt_checkpoint=ocdbt)]
    args = [ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))]

    def read() -> Any:
        return asyncio.run(handler().deserialize([leaf], args if handler is ArrayHandler else None))

    assert np.asarray(read()[0]).tolist() == TREE["a"].tolist()
    file = max(
        (file for file in (tmp_path / "c").rglob("*") if file.is_file()), key=lambda one: one.stat().st_size
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    with pytest.raises(ChecksumError) as caught:
        read()
    assert caught.value.key_path == "a"


def test_strings_that_a_type_handler_reads_are_compared(tmp_path: Path) -> None:
    save_tree(tmp_path / "c")
    leaf = ocp.type_handlers.ParamInfo(name="text", parent_dir=tmp_path / "c")
    assert asyncio.run(StringHandler().deserialize([leaf])) == ["words"]

    file = tmp_path / "c" / "_strings.json"
    file.write_text(file.read_text().replace("words", "wordt"))

    with pytest.raises(ChecksumError):
        asyncio.run(StringHandler().deserialize([leaf]))


def test_parts_are_compared_before_they_are_put_together(tmp_path: Path) -> None:
    v1.partial.save(tmp_path / "c", {"a": np.arange(3000.0)}, custom_metadata={"run": 5})
    (part,) = (tmp_path / "c.partial_save").iterdir()
    about = part / "_CHECKPOINT_METADATA"
    whole = about.read_bytes()
    about.write_text(json.dumps(json.loads(whole) | {"custom_metadata": {"run": 6}}))
    with pytest.raises(ChecksumError):
        v1.partial.finalize(tmp_path / "c")

    about.write_bytes(whole)
    data = max((part / "state" / "d").iterdir(), key=lambda file: file.stat().st_size)
    flipped = bytearray(data.read_bytes())
    flipped[100] ^= 1
    data.write_bytes(flipped)
    with pytest.raises(ChecksumError):
        v1.partial.finalize(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_nothing_is_put_together_while_a_part_is_saved(tmp_path: Path) -> None:
    v1.partial.save(tmp_path / "c", {"a": np.arange(3)})
    held = LocalStore().hold_reading(str(tmp_path / "c.partial_save"))  # as who saves a part holds it

    with pytest.raises(InUseError):
        v1.partial.finalize(tmp_path / "c")
    held.release()
    v1.partial.finalize(tmp_path / "c")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_no_part_is_saved_while_others_are_put_together(tmp_path: Path) -> None:
    v1.partial.save(tmp_path / "c", {"a": np.arange(3)})
    held = LocalStore().hold(str(tmp_path / "c.partial_save"))

    with pytest.raises(InUseError):
        v1.partial.save(tmp_path / "c", {"b": np.arange(3)})
    held.release()


def test_a_file_is_not_deleted_while_another_is_made_for_its_path(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    penstock.sync.export_safetensors({"a": np.arange(3)}, path)
    held = LocalStore().make_held(temporary_path(str(path)))  # as who saves to it holds it

    with pytest.raises(InUseError):
        v1.delete(path)
    assert path.exists()

    held.release()
    assert v1.delete(path)
    assert list(tmp_path.iterdir()) == []
