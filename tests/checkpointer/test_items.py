"""Several items in one checkpoint, saved and restored by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.unsealed import unseal

import penstock
from penstock import SaveFormat
from penstock.errors import (
    CorruptCheckpointError,
    DuplicateNameError,
    IncompleteCheckpointError,
    InvalidLeafError,
    NotACheckpointError,
    SpecError,
    StorageError,
    StructureMismatchError,
    UnsupportedFormatError,
)
from penstock.handlers import Composite, LocalStore
from penstock.items import Array, Json, NumpyRandomKey, Proto, PyTree, RandomKey
from penstock.kernel import StoreWrapper
from penstock.testing import FaultyStore

AssertSame = Callable[[Any, Any], None]

FORMATS = {
    "ocdbt": SaveFormat(),
    "directories": SaveFormat(ocdbt=False, zarr=3, codec="zstd", chunk_byte_size=1000),
    "small files": SaveFormat(ocdbt_target_data_file_size=100, rich_types=True, codec="auto"),
}


class Pair(NamedTuple):
    left: Any
    right: Any


def tree(fill: float = 1.0) -> dict[str, Any]:
    return {"big": np.full(9000, fill), "b.c": jnp.full((4, 3), fill), "s": "text", "t": (1, None, {})}


def message() -> Any:
    struct_pb2 = pytest.importorskip("google.protobuf.struct_pb2")
    made = struct_pb2.Struct()
    made.update({"a": 1.5, "b": ["x", None]})
    return made


def everything() -> Composite:
    return Composite(
        {"with space": Array(np.arange(3, dtype=np.int8))},
        state=tree(),
        ema=PyTree(tree(2.0), custom_metadata={"decay": 0.9}),
        config=Json({"layers": [1, 2.5, None, {"name": "ü"}], "empty": {}}),
        metrics=Json({"loss": 0.5}),
        jarr=Array(jnp.arange(4.0)),
        number=Array(7),
        key=RandomKey(jax.random.key(1)),
        urbg=RandomKey(jax.random.key(2, impl="unsafe_rbg")),
        raw=RandomKey(jax.random.PRNGKey(3)),
        legacy=NumpyRandomKey(np.random.RandomState(4).get_state()),
        state_dict=NumpyRandomKey(np.random.RandomState(5).get_state(legacy=False)),
        pair=Pair(1, jnp.ones(2)),
        empty={},
    )


def expected(form: SaveFormat) -> dict[str, Any]:
    plain = {**tree(), "t": tree()["t"] if form.rich_types else list(tree()["t"])}
    return {
        "with space": np.arange(3, dtype=np.int8),
        "state": plain,
        "ema": {**plain, "big": np.full(9000, 2.0), "b.c": jnp.full((4, 3), 2.0)},
        "config": {"layers": [1, 2.5, None, {"name": "ü"}], "empty": {}},
        "metrics": {"loss": 0.5},
        "jarr": jnp.arange(4.0),
        "number": 7,
        "key": jax.random.key(1),
        "urbg": jax.random.key(2, impl="unsafe_rbg"),
        "raw": jax.random.PRNGKey(3),
        "legacy": np.random.RandomState(4).get_state(),
        "state_dict": np.random.RandomState(5).get_state(legacy=False),
        "pair": {"left": 1, "right": jnp.ones(2)},
        "empty": {},
    }


def save(path: Path, items: Composite, form: SaveFormat | None = None, **options: Any) -> None:
    with penstock.sync.Checkpointer(save_format=form) as checkpointer:
        checkpointer.save(path, items, **options).result()


class TestAll:
    @pytest.mark.thinned(2)
    @pytest.mark.parametrize("form", FORMATS)
    def test_each_item_comes_back_as_it_was(self, tmp_path: Path, assert_same: AssertSame, form: str) -> None:
        save(tmp_path / "ckpt", everything(), FORMATS[form])

        found = penstock.sync.restore_items(tmp_path / "ckpt")

        wanted = expected(FORMATS[form])
        assert list(found) == sorted(wanted)
        for name, value in wanted.items():
            assert_same(found[name], value)

    @pytest.mark.anyio
    async def test_all_items_are_restored_by_a_checkpointer_and_in_one_call(
        self, tmp_path: Path, assert_same: AssertSame
    ) -> None:
        path = tmp_path / "ckpt"
        await penstock.save(path, Composite(state=tree(), config=Json([1])))

        async with penstock.Checkpointer() as checkpointer:
            found = await checkpointer.restore_items(path, like={"state": tree(0.0)})

        assert_same(found, {"config": [1], "state": tree()})
        assert_same(await penstock.restore_items(path, items=["config"]), {"config": [1]})
        assert checkpointer.statistics().leased == 0

    def test_all_items_are_restored_by_a_blocking_checkpointer(
        self, tmp_path: Path, assert_same: AssertSame
    ) -> None:
        with penstock.sync.Checkpointer() as checkpointer:
            checkpointer.save(tmp_path / "a", Composite(state=tree(), config=Json([1]))).result()
            assert_same(checkpointer.restore_items(tmp_path / "a", items=iter(["config"])), {"config": [1]})

    def test_a_target_for_each_kind(self, tmp_path: Path, assert_same: AssertSame) -> None:
        sent = message()
        save(tmp_path / "a", Composite(everything(), proto=Proto(sent)))
        like = {
            "state": {**tree(0.0), "big": np.ndarray},
            "pair": Pair(0, jnp.zeros(2)),
            "with space": np.zeros(3, np.int8),
            "jarr": np.ndarray,
            "key": jax.random.key(9),
            "proto": type(sent),
        }

        found = penstock.sync.restore_items(tmp_path / "a", like=like, items=[*like, "config"])

        assert found["proto"] == sent
        assert_same(found["state"], tree())
        assert_same(found["pair"], Pair(1, jnp.ones(2)))
        assert_same(found["jarr"], np.arange(4.0, dtype=np.float32))
        assert list(found) == [*like, "config"]
        assert penstock.sync.restore_items(tmp_path / "a", like={"proto": type(sent)()}, items=["proto"]) == {
            "proto": sent
        }
        assert "number_value: 1.5" in penstock.sync.restore_items(tmp_path / "a", items=["proto"])["proto"]

    def test_all_items_are_restored_as_mapped_memory(self, tmp_path: Path) -> None:
        save(tmp_path / "a", Composite(state=tree()))
        found = penstock.sync.restore_items(tmp_path / "a", mmap=True)
        assert not found["state"]["big"].flags.writeable

    def test_all_items_of_the_latest_step_are_restored(self, tmp_path: Path) -> None:
        for step in (9, 10):
            save(tmp_path / str(step), Composite(state={"x": step}, config=Json(step)))

        assert penstock.sync.restore_items(tmp_path) == {"config": 10, "state": {"x": 10}}

    def test_all_of_one_checkpoint_though_it_is_replaced_meanwhile(self, tmp_path: Path) -> None:
        ckpt = tmp_path / "ckpt"
        save(ckpt, Composite(a=Json(1), b={"x": 1}))
        again: list[int] = []

        class Replaced(StoreWrapper):
            """Replaces the checkpoint once the first item has been read."""

            def read_file(self, path: str) -> bytes:
                data = self.inner.read_file(path)
                if path.endswith("a/metadata") and not again:
                    again.append(1)
                    save(ckpt, Composite(a=Json(2), b={"x": 2}), overwrite=True)
                return data

        with penstock.sync.Checkpointer(store=Replaced(LocalStore())) as checkpointer:
            assert checkpointer.restore_items(ckpt) == {"a": 2, "b": {"x": 2}}
        assert again == [1]


class TestMetadata:
    def test_metadata_are_of_one_item_or_of_all(self, tmp_path: Path) -> None:
        save(tmp_path / "a", everything(), custom_metadata={"step": 3})

        about = penstock.sync.metadata(tmp_path / "a", item="ema")
        assert (about.custom_metadata, about.tree_custom_metadata) == ({"step": 3}, {"decay": 0.9})
        about = penstock.sync.metadata(tmp_path / "a", item="state")
        assert (about.custom_metadata, about.tree_custom_metadata) == ({"step": 3}, None)

    def test_items_are_told_to_orbax_and_each_is_finished(self, tmp_path: Path) -> None:
        save(tmp_path / "a", Composite(state=tree(), key=RandomKey(jax.random.key(0)), c=Json(1)))

        recorded = json.loads((tmp_path / "a" / "_CHECKPOINT_METADATA").read_bytes())
        assert {name: kind.rpartition(".")[2] for name, kind in recorded["item_handlers"].items()} == {
            "state": "PyTreeCheckpointHandler",
            "key": "JaxRandomKeyCheckpointHandler",
            "c": "JsonCheckpointHandler",
        }
        marks = {
            mark.parent.relative_to(tmp_path / "a").as_posix()
            for mark in tmp_path.rglob("commit_success.txt")
        }
        assert marks == {".", "state", "c", "key", "key/jax_random_key", "key/jax_random_key_metadata"}

    def test_items_of_documents_alone_need_no_arrays(self, tmp_path: Path) -> None:
        save(tmp_path / "a", Composite(c=Json({"x": 1}), d=Json(None)))
        assert penstock.sync.restore_items(tmp_path / "a") == {"c": {"x": 1}, "d": None}

    @pytest.mark.parametrize("zarr", [2, 3])
    def test_arrays_of_an_item_lie_in_its_directory(self, tmp_path: Path, zarr: Literal[2, 3]) -> None:
        form = SaveFormat(ocdbt=False, zarr=zarr)
        save(tmp_path / "a", Composite(one={"x": np.ones(2)}, two={"x": np.ones(2)}), form)
        name = ".zarray" if zarr == 2 else "zarr.json"
        assert {str(file.relative_to(tmp_path / "a")) for file in tmp_path.rglob(name)} == {
            f"one/x/{name}",
            f"two/x/{name}",
        }


class TestRefused:
    @pytest.mark.parametrize(
        ("items", "problem"),
        [
            (Composite(), "at least one item"),
            (Composite(a=Json(object())), "'a' cannot be written as JSON"),
            (Composite(a=Json({1, 2})), "'a' cannot be written as JSON"),
            (Composite(a=PyTree({}, custom_metadata={"x": object()})), "'a' cannot be written as JSON"),
            (Composite(a=Array("text")), "neither array nor number"),
            (Composite(a=Array({"x": np.ones(2)})), "neither array nor number"),
            (Composite(a=Array(None)), "neither array nor number"),
            (Composite(a=RandomKey(5)), "no jax PRNG key"),
            (Composite(a=NumpyRandomKey(np.random.default_rng(0))), "get_state"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            (Composite(metrics={"loss": 1.0}), "'metrics' must be Json"),
            *[
                (Composite({name: Json(1)}), "cannot be called")
                for name in ("", ".", "..", "a/b", "a\0", "_x", "AUTO")
            ],
            *[
                (Composite({name: Json(1)}), "cannot be called")
                for name in ("descriptor", "x" * 256, "manifest.ocdbt")
            ],
            (Composite({"x.orbax-checkpoint-tmp": Json(1)}), "cannot be called"),
        ],
    )
    def test_what_no_item_can_be(self, tmp_path: Path, items: Composite, problem: str) -> None:
        with pytest.raises(SpecError, match=problem):
            save(tmp_path / "ckpt", items)

        assert list(tmp_path.iterdir()) == []

    def test_what_is_no_message(self, tmp_path: Path) -> None:
        message()
        with pytest.raises(SpecError, match="'a' is no protobuf message, but a str"):
            save(tmp_path / "ckpt", Composite(a=Proto("text")))

    def test_names_that_collide_in_an_item_with_both_key_paths(self, tmp_path: Path) -> None:
        items = Composite(a={"x.y": 1, "x": {"y": 2}}, b={})
        with pytest.raises(DuplicateNameError, match=r"\['a'\]\['x'\]\['y'\].*\['a'\]\['x.y'\]"):
            save(tmp_path / "ckpt", items)

        items = Composite(a={"x": np.ones(2), "x/0": np.ones(2)}, b={})
        with pytest.raises(DuplicateNameError, match=r"\['a'\]\['x'\]"):
            save(tmp_path / "ckpt", items, SaveFormat(ocdbt=False))

    def test_a_leaf_in_an_item_is_named_with_it(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidLeafError) as caught:
            save(tmp_path / "ckpt", Composite(state={"x": [np.array(["a"])]}, more={}))
        assert caught.value.key_path == "['state']['x'][0]"

    def test_a_leaf_of_the_only_tree_is_named_as_it_is_there(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidLeafError) as caught:
            save(tmp_path / "ckpt", Composite(state={"x": [np.array(["a"])]}, config=Json(1)))
        assert caught.value.key_path == "['x'][0]"

    def test_save_args_for_an_item_without_arrays(self, tmp_path: Path) -> None:
        args = {"state": None, "config": penstock.SaveArgs()}
        with pytest.raises(SpecError, match="save_args are for 'config', but only 'state' has arrays"):
            save(tmp_path / "ckpt", Composite(state=tree(), config=Json(1)), save_args=args)

    def test_functions_of_a_key_path_get_that_of_the_tree_of_items(self, tmp_path: Path) -> None:
        seen: list[Any] = []
        for items in (Composite(state={"x": np.ones(3)}), Composite(state={"x": np.ones(3)}, other={"y": 1})):
            seen.clear()
            save(tmp_path / "ckpt", items, overwrite=True, save_args=seen.append, prioritise=seen.append)
            assert seen.count(("state", "x")) == 2

    def test_save_args_are_those_of_the_tree_of_items(self, tmp_path: Path) -> None:
        args = {"state": {"b.c": penstock.SaveArgs(dtype=jnp.bfloat16)}}
        save(tmp_path / "ckpt", Composite(state=tree(), config=Json(1)), save_args=args)
        assert penstock.sync.restore_items(tmp_path / "ckpt")["state"]["b.c"].dtype == jnp.bfloat16

        save(tmp_path / "two", Composite(state=tree(), ema=tree()), save_args=args)
        found = penstock.sync.restore_items(tmp_path / "two")
        assert (found["state"]["b.c"].dtype, found["ema"]["b.c"].dtype) == (jnp.bfloat16, jnp.float32)

    def test_items_that_are_missing_or_not_asked_for_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "ckpt"
        save(path, Composite(state=tree(), config=Json(1), arr=Array(1)))
        restore = penstock.sync.restore_items
        absent: list[dict[str, Any]] = [{"items": ["nothing"]}, {"like": {"nothing": 1}}]
        for options in absent:
            with pytest.raises(
                NotACheckpointError, match=r"no item 'nothing' \(its items: arr, config, state\)"
            ):
                restore(path, **options)
        with pytest.raises(SpecError, match="'arr', which is not among"):
            restore(path, items=["state"], like={"arr": 1})
        with pytest.raises(SpecError, match="a list of names, not 'state'"):
            restore(path, items="state")
        with pytest.raises(SpecError, match="like must be a mapping"):
            restore(path, like=[1])  # type: ignore[arg-type]  # the point
        with pytest.raises(TypeError, match="strict"):
            restore(path, strict=False)  # type: ignore[call-arg]  # the point
        with pytest.raises(NotACheckpointError):
            restore(tmp_path / "nothing")

    def test_a_message_of_another_class(self, tmp_path: Path) -> None:
        sent = message()
        save(tmp_path / "ckpt", Composite(p=Proto(sent)))
        wrappers = pytest.importorskip("google.protobuf.wrappers_pb2")
        with pytest.raises(CorruptCheckpointError, match="no text of a StringValue"):
            penstock.sync.restore_items(tmp_path / "ckpt", like={"p": wrappers.StringValue})
        with pytest.raises(StructureMismatchError):
            penstock.sync.restore_items(tmp_path / "ckpt", like={"p": 5})

    def test_what_has_no_items(self, tmp_path: Path) -> None:
        penstock.sync.save(tmp_path / "flat", tree())
        penstock.sync.export_safetensors({"x": np.ones(2)}, tmp_path / "x.safetensors")
        for name in ("flat", "x.safetensors"):
            with pytest.raises(UnsupportedFormatError, match="restore it as a whole"):
                penstock.sync.restore_items(tmp_path / name)

    def test_a_lost_item_and_one_half_written(self, tmp_path: Path) -> None:
        path = tmp_path / "ckpt"
        save(path, Composite(a=Json(1), b=Json(2)))
        (path / "b").rename(tmp_path / "elsewhere")
        with pytest.raises(CorruptCheckpointError, match="b: is missing"):
            penstock.sync.restore_items(path)
        assert penstock.sync.restore(path, item="a") == 1

        (tmp_path / "elsewhere").rename(path / "b")
        unseal(path)
        (path / "_PENSTOCK_INTEGRITY").unlink()
        (path / "commit_success.txt").unlink()
        document = json.loads((path / "_CHECKPOINT_METADATA").read_bytes())
        (path / "_CHECKPOINT_METADATA").write_text(json.dumps(document | {"commit_timestamp_nsecs": None}))
        with pytest.raises(IncompleteCheckpointError):
            penstock.sync.restore_items(path)

    def test_a_failure_leaves_nothing(self, tmp_path: Path) -> None:
        store = FaultyStore(LocalStore())
        store.fail_on("write_file", 5)
        with penstock.sync.Checkpointer(store=store) as checkpointer, pytest.raises(StorageError):
            checkpointer.save(tmp_path / "ckpt", everything()).result()
        assert list(tmp_path.iterdir()) == []
        assert store.open_files == 0
