"""Restoring onto another target: only what was asked for changes, and each change is reported."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.byte_counting import CountingStore
from tests.stages.stage_rig import Parcel, ParcelHandler, with_parcels
from tests.xla_settings import xla_flags

import penstock
from penstock import Checkpointer, RestoreReport, Transform
from penstock.errors import HandlerFailedError, SpecError, StructureMismatchError
from penstock.handlers import OrbaxLayout, default_handlers
from penstock.handlers.leaves import HostRegion
from penstock.kernel import CheckedRead, DirectRead, ScatterRead
from penstock.pipelines import restore_pipeline

AssertSame = Callable[[Any, Any], None]

TREE: dict[str, Any] = {
    "count": 3,
    "empty": {},
    "key": jax.random.key(0),
    "layers": [
        {"bias": np.arange(4.0), "kernel": jnp.arange(12.0).reshape(3, 4)},
        {"bias": np.arange(4.0) + 4, "kernel": jnp.arange(12.0).reshape(3, 4) + 12},
    ],
    "name": "text",
    "rate": 0.1,
    "steps": np.arange(3, dtype=np.uint8) + 250,
}


def over(n: int, *axes: Any, first: int = 0) -> NamedSharding:
    devices: Any = np.array(jax.devices()[first : first + n])
    return NamedSharding(Mesh(devices, ("x",)), PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax's


def struct(shape: tuple[int, ...], dtype: Any, **options: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype, **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onto") / "ckpt"
    penstock.sync.save(path, TREE)
    return path


class Restored:
    """A restore's result, its report, and what it read."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.reports: list[RestoreReport] = []
        self.store = CountingStore()
        with penstock.sync.Checkpointer(store=cast("Any", self.store)) as checkpointer:
            self.tree = checkpointer.restore(path, on_report=self.reports.append, **options)

    @property
    def report(self) -> RestoreReport:
        (report,) = self.reports
        return report

    @property
    def told(self) -> list[str]:
        return [" ".join(str(change).split()) for change in self.report.changes]


def refused(path: Path, **options: Any) -> dict[tuple[str, str], str]:
    with pytest.raises(StructureMismatchError) as raised:
        penstock.sync.restore(path, **options)

    assert all(str(each) in str(raised.value) for each in raised.value.differences)
    return {
        (each.kind, each.key_path): str(each).removeprefix(f"{each.kind:<11} {each.key_path}: ")
        for each in raised.value.differences
    }


class TestRename:
    def test_a_leaf_and_a_node_without_a_target(self, path: Path, assert_same: AssertSame) -> None:
        found = Restored(
            path, rename={"steps": "state.steps", "layers.0": "first", "layers": "rest", "": "top"}
        )
        expected = {
            "top": {name: TREE[name] for name in ("count", "empty", "key", "name", "rate")},
            "first": TREE["layers"][0],
            "rest": {"1": TREE["layers"][1]},
            "state": {"steps": TREE["steps"]},
        }
        assert_same(found.tree, expected)
        assert "renamed ['first']['bias']: ['layers'][0]['bias']" in found.told

    def test_lists_stay_lists_where_the_indices_are_the_old_ones(
        self, path: Path, assert_same: AssertSame
    ) -> None:
        found = Restored(
            path, rename=lambda keys: ("blocks", *keys[1:-1], "b") if keys[-1] == "bias" else None
        )
        assert_same(found.tree, {"blocks": [{"b": np.arange(4.0)}, {"b": np.arange(4.0) + 4}]})
        assert found.report.key_paths("renamed") == ("['blocks'][0]['b']", "['blocks'][1]['b']")
        assert set(found.report.key_paths("skipped")) == {
            *("['count']", "['empty']", "['key']", "['name']", "['rate']", "['steps']"),
            *("['layers'][0]['kernel']", "['layers'][1]['kernel']"),
        }
        assert found.report.nbytes == 64
        assert found.store.nbytes <= 64 + 48  # one call may also read the kernel that lies between the two

    def test_to_the_names_of_a_target(self, path: Path, assert_same: AssertSame) -> None:
        like = {**{name: TREE[name] for name in TREE if name not in {"steps", "layers"}}, "a.b": np.ndarray}
        like["blocks"] = ({"bias": np.ndarray, "kernel": jax.Array},) * 2
        found = Restored(path, like=like, rename={("steps",): "a.b", "layers": ("blocks",)})
        expected = {**like, "a.b": TREE["steps"], "blocks": tuple(TREE["layers"])}
        assert_same(found.tree, expected)

    def test_names_swap(self, tmp_path: Path, assert_same: AssertSame) -> None:
        penstock.sync.save(tmp_path / "a", {"a": 1, "b": 2})
        assert_same(penstock.sync.restore(tmp_path / "a", rename={"a": "b", "b": "a"}), {"a": 2, "b": 1})

    def test_a_key_without_letters_is_not_the_root(self, tmp_path: Path, assert_same: AssertSame) -> None:
        penstock.sync.save(tmp_path / "a", {"": 1, "b": 2})
        assert_same(penstock.sync.restore(tmp_path / "a", rename={("",): "c"}), {"c": 1, "b": 2})
        for root in ((), ""):
            assert_same(penstock.sync.restore(tmp_path / "a", rename={root: "c"}), {"c": {"": 1, "b": 2}})

    def test_items_of_a_list_change_places(self, path: Path, assert_same: AssertSame) -> None:
        found = Restored(path, rename={"layers.0": "layers.1", "layers.1": "layers.0"})
        assert_same(found.tree, {**TREE, "layers": TREE["layers"][::-1]})
        deeper = Restored(path, rename={"layers": "model.blocks", "": None})
        assert_same(deeper.tree, {"model": {"blocks": TREE["layers"]}})

    def test_a_root_goes_away(self, tmp_path: Path, assert_same: AssertSame) -> None:
        penstock.sync.save(tmp_path / "a", {"params": {"w": 1}})
        assert_same(penstock.sync.restore(tmp_path / "a", rename={"params": ""}), {"w": 1})

    def test_all_that_is_wrong_is_in_one_error(self, path: Path) -> None:
        found = refused(path, rename={"steps": "count", "layer": "x", "name": "layers.0"})
        assert found == {
            (
                "rule",
                "['count']",
            ): "['count'] and ['steps'] would both be restored as 'count'",
            ("rule", "'layer'"): "rename names it, but no stored leaf has this name",
            (
                "rule",
                "['layers'][0]['bias']",
            ): "would lie within the leaf ['layers']['0']",
            (
                "rule",
                "['layers'][0]['kernel']",
            ): "would lie within the leaf ['layers']['0']",
        }
        assert "did you mean 'steps'" in refused(path, rename={"step": "x"})["rule", "'step'"]

    def test_a_difference_says_both_names(self, path: Path) -> None:
        found = refused(path, like={"x": np.zeros(4, np.uint8)}, rename={"steps": "x"}, on_unexpected="skip")
        (text,) = found.values()
        assert text.endswith("uint8[4] in the target, np.ndarray uint8[3] (as ['steps']) on disk")

    @pytest.mark.parametrize("rename", [{"a": 5}, {5: "a"}, {"count": ["x"]}, lambda keys: list(keys), 5])
    def test_what_is_no_name_is_refused(self, path: Path, rename: Any) -> None:
        with pytest.raises(SpecError):
            penstock.sync.restore(path, rename=rename)

    def test_a_function_that_raises_is_named_with_the_leaf(self, path: Path) -> None:
        with pytest.raises(
            HandlerFailedError, match=r"\['count'\]: rename .*lambda.* failed: ZeroDivisionError"
        ) as raised:
            penstock.sync.restore(path, rename=lambda keys: str(1 // 0))
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


class TestDtype:
    def test_one_dtype_is_for_arrays_of_its_kind(self, path: Path, assert_same: AssertSame) -> None:
        found = Restored(path, dtype=jnp.bfloat16)

        def cast_leaf(leaf: Any) -> Any:
            floating = isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)
            return leaf.astype(jnp.bfloat16) if floating else leaf

        assert_same(found.tree, jax.tree.map(cast_leaf, TREE))
        assert found.told == [
            "cast ['layers'][0]['bias']: float64 -> bfloat16",
            "cast ['layers'][0]['kernel']: float32 -> bfloat16",
            "cast ['layers'][1]['bias']: float64 -> bfloat16",
            "cast ['layers'][1]['kernel']: float32 -> bfloat16",
        ]

    def test_patterns_name_leaves_of_any_kind_and_the_first_counts(self, path: Path) -> None:
        found = Restored(
            path, dtype={"steps": "int8", "layers.0.*": None, "*.bias": np.float16, "*.none": "int8"}
        )
        assert found.tree["steps"].tolist() == [-6, -5, -4]  # cast as in C
        assert [layer["bias"].dtype for layer in found.tree["layers"]] == [np.float64, np.float16]
        assert found.report.key_paths("unused") == ("*.none",)

    def test_a_function_of_the_key_path_in_the_result(self, path: Path) -> None:
        found = Restored(path, dtype=lambda keys: "int32" if keys == ("n",) else None, rename={"steps": "n"})
        assert found.tree["n"].dtype == np.int32
        assert found.report.key_paths("cast") == ("['n']",)

    def test_like_has_the_say_if_it_is_given_it(self, path: Path, assert_same: AssertSame) -> None:
        like = {**TREE, "steps": np.zeros(3, np.float32), "count": float}
        found = Restored(path, like={**like, "count": 3}, dtype="like")
        assert_same(found.tree, {**TREE, "steps": np.array([250, 251, 252], np.float32)})
        assert set(refused(path, like=like, dtype="like")) == {("dtype", "['count']")}
        assert Restored(path, like=like, dtype={"count": float, "steps": "float32"}).tree["count"] == 3.0

    def test_a_cast_that_does_not_give_what_the_target_has_is_a_difference(self, path: Path) -> None:
        assert set(refused(path, like=TREE, dtype={"steps": "int8"})) == {("dtype", "['steps']")}

    def test_sharded_arrays_are_cast_too(self, tmp_path: Path, assert_same: AssertSame) -> None:
        array = jax.device_put(jnp.arange(64.0).reshape(8, 8), over(8, "x"))
        penstock.sync.save(tmp_path / "a", array)
        like = struct((8, 8), jnp.float16, sharding=over(4, None, "x"))
        found = Restored(tmp_path / "a", like=like, dtype="like")
        assert_same(found.tree, jax.device_put(array.astype(jnp.float16), like.sharding))
        assert found.store.nbytes == 256

    def test_no_imaginary_part_is_dropped(self, tmp_path: Path) -> None:
        penstock.sync.save(tmp_path / "a", {"z": np.ones(2, np.complex64)})
        assert "imaginary" in refused(tmp_path / "a", dtype={"z": "float32"})["dtype", "['z']"]

    def test_what_jax_makes_of_a_python_number_stands_for_it(self, tmp_path: Path) -> None:
        state = {"step": 3, "rate": 0.1, "scale": jnp.float32(2), "ready": True}
        shapes = jax.eval_shape(lambda: state)
        penstock.sync.save(tmp_path / "x", {**state, "step": 3_000_000_000})

        restored: Any = penstock.sync.restore(tmp_path / "x", like=shapes)

        # As they were saved, neither rounded nor narrowed, and as weakly typed.
        assert (restored["step"], type(restored["step"])) == (3_000_000_000, int)
        assert (restored["rate"], type(restored["rate"])) == (0.1, float)
        assert isinstance(restored["scale"], jax.Array)
        told = refused(tmp_path / "x", like={**shapes, "step": shapes["rate"]})
        assert told == {("dtype", "['step']"): "float in the target, scalar int64[] on disk"}

    def test_small_and_large_types_meet(self, tmp_path: Path) -> None:
        array = np.array([0.5, 1, -2, 3, 1e30]).astype(np.float32)
        penstock.sync.save(tmp_path / "a", {"a": array})
        for name in ("float8_e4m3fn", "bfloat16", "float16", "float64", "int4", "bool", "complex64"):
            dtype = np.dtype(getattr(ml_dtypes, name, name))
            with np.errstate(all="ignore"):
                expected = array.astype(dtype)
            assert (
                penstock.sync.restore(tmp_path / "a", dtype={"a": dtype})["a"].tobytes() == expected.tobytes()
            )

    @pytest.mark.parametrize("dtype", ["flaot32", {"a": "nothing"}, {5: "int8"}, lambda keys: "none such"])
    def test_what_is_no_dtype_is_refused(self, path: Path, dtype: Any) -> None:
        with pytest.raises(SpecError):
            penstock.sync.restore(path, dtype=dtype)

    def test_staging_memory_is_leased_and_given_back(self, tmp_path: Path) -> None:
        penstock.sync.save(tmp_path / "a", {"a": np.ones(1000), "b": np.ones(1000)})
        with penstock.sync.Checkpointer(memory_limit=8000) as checkpointer:
            found = checkpointer.restore(tmp_path / "a", dtype=np.float32)
            statistics = checkpointer._inner.statistics()
        assert found["b"].sum() == 1000
        assert (statistics.leased, statistics.peak) == (0, 8000)


class TestShapes:
    def test_padded_and_cut_off_at_the_end_of_each_axis(self, path: Path, assert_same: AssertSame) -> None:
        layer = {"bias": np.zeros(6), "kernel": jnp.zeros((5, 2))}
        like = {"layers": [layer, layer]}
        found = Restored(path, like=like, strict=False, on_unexpected="skip")
        for got, stored in zip(found.tree["layers"], TREE["layers"], strict=True):
            assert_same(got["bias"], np.concatenate([stored["bias"], np.zeros(2)]))
            assert_same(got["kernel"], jnp.concatenate([stored["kernel"][:, :2], jnp.zeros((2, 2))]))

        assert found.told[-2:] == [
            "resized ['layers'][1]['bias']: (4,) -> (6,)",
            "resized ['layers'][1]['kernel']: (3, 4) -> (5, 2)",
        ]
        assert {kind for kind, _ in refused(path, like=like, on_unexpected="skip")} == {"shape"}

    def test_together_with_a_cast_onto_a_mesh(self, tmp_path: Path, assert_same: AssertSame) -> None:
        array = np.arange(60, dtype=np.float32).reshape(6, 10)
        penstock.sync.save(tmp_path / "a", [jax.device_put(array[:, :8], over(2, "x"))])
        like = [struct((16, 4), jnp.int16, sharding=over(8, "x"))]
        found = Restored(tmp_path / "a", like=like, strict=False, dtype="like")
        expected = np.zeros((16, 4), np.int16)
        expected[:6] = array[:, :4]
        assert_same(found.tree, [jax.device_put(jnp.asarray(expected), like[0].sharding)])

    def test_only_the_rows_that_remain_are_read(self, tmp_path: Path) -> None:
        penstock.sync.save(tmp_path / "a", {"a": np.arange(4000.0).reshape(1000, 4)})
        for verify, nbytes in ((False, 10 * 4 * 8), (True, 1000 * 4 * 8)):  # a checksum is of the whole piece
            found = Restored(tmp_path / "a", like={"a": np.zeros((10, 4))}, strict=False, verify=verify)
            assert found.tree["a"].tolist() == np.arange(40.0).reshape(10, 4).tolist()
            assert found.store.nbytes == nbytes

    def test_a_leaf_without_rows_is_truncated_and_padded(self, tmp_path: Path) -> None:
        penstock.sync.save(tmp_path / "a", {"a": np.ones((2, 0)), "b": jnp.ones(3)})
        like = {"a": np.zeros((2, 2)), "b": jnp.zeros(0)}
        found = Restored(tmp_path / "a", like=like, strict=False)
        assert found.tree["a"].tolist() == [[0, 0], [0, 0]]
        assert found.tree["b"].shape == (0,)
        assert found.store.nbytes == 0

    def test_ranks_and_keys_must_fit(self, path: Path) -> None:
        like = {"steps": np.zeros((3, 1), np.uint8), "key": jax.random.split(jax.random.key(0), 2)}
        found = refused(path, like=like, strict=False, on_unexpected="skip")
        assert set(found) == {("shape", "['steps']"), ("shape", "['key']")}


class TestPartial:
    def test_a_subset_reads_nothing_else(self, path: Path, assert_same: AssertSame) -> None:
        found = Restored(path, like={"steps": np.ndarray}, on_unexpected="skip")
        assert_same(found.tree, {"steps": TREE["steps"]})
        assert found.store.nbytes == found.report.nbytes == 3
        assert found.report.n_leaves == 1
        assert set(found.report.key_paths("skipped")) == {
            *("['count']", "['key']", "['name']", "['rate']"),
            *(f"['layers'][{n}]['{name}']" for n in range(2) for name in ("bias", "kernel")),
        }

    def test_a_superset_keeps_what_the_target_has(self, path: Path, assert_same: AssertSame) -> None:
        new = {"array": jnp.ones(2), "none": None, "text": "new", "where": np.zeros(2)}
        found = Restored(path, like={**TREE, "new": new}, on_missing="keep")
        assert_same(found.tree, {**TREE, "new": new})
        assert found.tree["new"]["where"] is new["where"]
        assert set(found.report.key_paths("kept")) == {f"['new']['{name}']" for name in new}
        assert found.report.n_leaves == 10

    def test_a_target_without_a_stored_leaf_restores_nothing(
        self, path: Path, assert_same: AssertSame
    ) -> None:
        found = Restored(path, like={"new": 1}, on_missing="keep", on_unexpected="skip")
        assert_same(found.tree, {"new": 1})
        assert found.store.nbytes == 0

    def test_what_is_no_value_cannot_be_kept(self, path: Path) -> None:
        gone = jnp.ones(2)
        gone.delete()
        like = {**TREE, "gone": gone, "struct": struct((2,), np.float32), "type": int}
        found = refused(path, like=like, on_missing="keep")
        assert found == {
            (
                "rule",
                "['gone']",
            ): "would be kept from the target, where it is a deleted or donated array",
            (
                "rule",
                "['struct']",
            ): "would be kept from the target, where it is abstract (jax.ShapeDtypeStruct)",
            (
                "rule",
                "['type']",
            ): "would be kept from the target, where it is a type (int)",
        }

    def test_each_side_is_opened_alone(self, path: Path) -> None:
        like = {"steps": np.ndarray, "new": 1}
        assert set(refused(path, like=like, on_unexpected="skip")) == {("missing", "['new']")}
        assert {kind for kind, _ in refused(path, like=like, on_missing="keep")} == {"unexpected"}

    def test_the_list_begins_with_what_cannot_be_done(self, path: Path) -> None:
        like = {"steps": np.zeros(9), "new": 1}
        with pytest.raises(StructureMismatchError) as raised:
            penstock.sync.restore(path, like=like, rename={"none": "x"})
        kinds = [each.kind for each in raised.value.differences]
        assert list(dict.fromkeys(kinds)) == ["rule", "missing", "unexpected", "dtype"]

    def test_other_differences_stay_errors(self, path: Path) -> None:
        like = {"steps": np.zeros(3), "count": np.ndarray, "name": 5}
        found = refused(path, like=like, on_missing="keep", on_unexpected="skip")
        assert set(found) == {("dtype", "['steps']"), ("type", "['name']")}


class TestTransforms:
    def test_only_what_the_result_needs_is_read_and_once_for_all_functions(
        self, tmp_path: Path, assert_same: AssertSame
    ) -> None:
        qkv = np.arange(30.0).reshape(3, 10)
        penstock.sync.save(tmp_path / "a", {"qkv": qkv, "large": np.zeros(100_000)})
        parts = {
            name: Transform(original_key="qkv", value_fn=itemgetter(at)) for at, name in enumerate("qkv")
        }
        found = Restored(tmp_path / "a", like={name: np.zeros(10) for name in "qkv"}, transforms=parts)
        assert_same(found.tree, {"q": qkv[0], "k": qkv[1], "v": qkv[2]})
        assert found.store.nbytes == qkv.nbytes
        assert found.report.key_paths("skipped") == ("['large']",)
        assert found.report.key_paths("computed") == ("['k']", "['q']", "['v']")
        found.tree["q"][0] = 5  # each array has its own memory and is writable
        assert all(leaf.base is None for leaf in found.tree.values())

    def test_functions_work_where_the_result_is_to_be(self, tmp_path: Path, assert_same: AssertSame) -> None:
        penstock.sync.save(tmp_path / "a", {"w": jnp.arange(64.0).reshape(16, 4)})
        seen: list[Any] = []

        def halve(value: Any) -> Any:
            seen.append(value.sharding)
            return value[:8]

        like = {"w": struct((8, 4), np.float32, sharding=over(4, "x"))}
        found = Restored(tmp_path / "a", like=like, transforms={"w": Transform(value_fn=halve)})
        assert_same(found.tree, {"w": jax.device_put(jnp.arange(32.0).reshape(8, 4), over(4, "x"))})
        assert seen == [over(4, "x")]

    def test_uncommitted_targets_get_uncommitted_arrays(self, path: Path, assert_same: AssertSame) -> None:
        double = Transform(original_key="layers/0/kernel", value_fn=lambda value: value * 2)
        found = Restored(path, like={"x": jnp.zeros((3, 4))}, transforms={"x": double})
        assert_same(found.tree, {"x": TREE["layers"][0]["kernel"] * 2})

    def test_an_input_that_cannot_lie_there_comes_as_it_was_saved(
        self, path: Path, assert_same: AssertSame
    ) -> None:
        like = {"x": struct((8, 4), np.float32, sharding=over(4, "x"))}
        rule = Transform(
            original_key="layers/0/kernel", value_fn=lambda value: jnp.concatenate([value, jnp.zeros((5, 4))])
        )
        found = Restored(path, like=like, transforms={"x": rule})
        expected = jnp.concatenate([TREE["layers"][0]["kernel"], jnp.zeros((5, 4))])
        assert_same(found.tree, {"x": jax.device_put(expected, over(4, "x"))})

    def test_wide_values_stay_wide(self, path: Path) -> None:
        like = {"x": struct((4,), np.float64, sharding=over(4, "x")), "y": jax.Array}
        rule = Transform(original_key="layers/0/bias", value_fn=np.asarray)
        found = Restored(path, like=like, transforms={"x|y": rule})
        assert [leaf.dtype for leaf in found.tree.values()] == [np.float64, np.float64]

    def test_an_input_that_others_need_too_cannot_be_changed(self, path: Path) -> None:
        def change(value: Any) -> Any:
            value[0] = 1
            return value

        like = {"x": np.zeros(3, np.uint8), "y": np.zeros(3, np.uint8)}
        alone = Restored(path, like={"x": like["x"]}, transforms={"x": Transform("steps", value_fn=change)})
        assert alone.tree["x"].tolist() == [1, 251, 252]
        with pytest.raises(HandlerFailedError, match="read-only"):
            Restored(path, like=like, transforms={"x|y": Transform("steps", value_fn=change)})

    def test_keys_strings_and_types(self, path: Path, assert_same: AssertSame) -> None:
        rules = {
            "k": Transform(original_key="key", value_fn=lambda key: jax.random.fold_in(key, 1)),
            "t": Transform(original_key="name", value_fn=lambda text: text.upper()),
            "n": Transform(original_key="count", value_fn=float),
            "a": Transform(original_key="steps", value_fn=lambda value: jnp.asarray(value)),
            "b": Transform(original_key="layers/0/kernel", value_fn=lambda value: np.asarray(value)),
        }
        like = {"k": TREE["key"], "t": "", "n": float, "a": np.ndarray, "b": jax.Array}
        found = Restored(path, like=like, transforms=rules)
        expected = {"k": jax.random.fold_in(TREE["key"], 1), "t": "TEXT", "n": 3.0, "a": TREE["steps"]}
        assert_same(found.tree, {**expected, "b": TREE["layers"][0]["kernel"]})

    def test_every_value_that_does_not_fit_is_in_one_error(self, path: Path) -> None:
        rules = {
            "steps": Transform(value_fn=lambda value: value[:1]),
            "count": Transform(value_fn=bool),
            "name": Transform(value_fn=len),
        }
        like = {"steps": np.zeros(3, np.uint8), "count": 0, "name": ""}
        assert refused(path, like=like, transforms=rules) == {
            ("rule", "['count']"): "int in the target, bool made by its function",
            ("rule", "['name']"): "str in the target, int made by its function",
            (
                "rule",
                "['steps']",
            ): "ndarray uint8[3] in the target, ndarray uint8[1] made by its function",
        }

    def test_several_inputs_from_a_tree_with_the_rest_described(self, path: Path) -> None:
        seen: list[Any] = []

        def stack(key: str, tree: Any, like: Any) -> Any:
            seen.append((key, tree, like))
            return np.stack([layer["bias"] for layer in tree["layers"]])

        like = {"x": np.zeros((2, 4))}
        inputs = {r"layers/\d+/bias": None, "empty": np.ndarray}
        rule = Transform(multi_value_fn=stack, multi_value_fn_input_args=inputs)
        found = Restored(path, like=like, transforms={"x": rule})
        assert found.tree["x"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert found.store.nbytes == 64
        ((key, tree, target),) = seen
        assert (key, target is like["x"]) == ("x", True)
        assert (tree["layers"][1]["kernel"].shape, tree["steps"].dtype) == ((3, 4), "uint8")
        assert tree["empty"].is_empty_marker

    def test_a_slash_in_a_key_is_no_riddle_that_is_guessed(self, tmp_path: Path) -> None:
        penstock.sync.save(tmp_path / "a", {"a/b": 1, "a": {"b": 2}})
        found = refused(tmp_path / "a", like={"x": 0}, transforms={"x": Transform(original_key="a/b")})
        assert "means several leaves" in found["rule", "['x']"]

    def test_casting_applies_to_what_no_function_makes(self, path: Path) -> None:
        like = {"steps": np.zeros(3, np.int32), "x": np.zeros(3, np.uint8)}
        rules = {"x": Transform(original_key="steps", value_fn=lambda value: value)}
        found = Restored(path, like=like, transforms=rules, dtype="like")
        assert [leaf.dtype for leaf in found.tree.values()] == [np.int32, np.uint8]

    def test_a_pipeline_that_cannot_make_anything_is_refused(self, path: Path) -> None:
        pipeline = restore_pipeline()
        assert "derive" not in pipeline.names  # a restore without options does not have this stage
        with pytest.raises(penstock.PenstockError, match="RestoredTree"):
            Restored(path, like={}, transforms={}, pipeline=pipeline.without("assemble"))


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"transforms": {}},
            {"strict": False},
            {"on_missing": "keep"},
            {"on_unexpected": "skip"},
            {"dtype": "like"},
        ],
    )
    def test_some_need_a_target(self, path: Path, options: Any) -> None:
        with pytest.raises(SpecError, match="only with a target"):
            penstock.sync.restore(path, **options)

    @pytest.mark.parametrize(
        "options",
        [
            {"transforms": {}, "rename": {}},
            {"transforms": {}, "on_missing": "keep"},
            {"transforms": {}, "on_unexpected": "skip"},
            {"transforms": {"a": "b"}},
            {"transforms": 5},
            {"on_missing": "skip"},
            {"on_unexpected": None},
        ],
    )
    def test_contradictions_are_refused(self, path: Path, options: Any) -> None:
        with pytest.raises(SpecError):
            penstock.sync.restore(path, like=TREE, **options)

    def test_a_misspelt_option_is_an_error(self, path: Path) -> None:
        with pytest.raises(TypeError, match="renam"):
            penstock.sync.restore(path, renam={})  # type: ignore[call-overload]  # the point

    def test_without_options_the_report_has_no_changes(self, path: Path) -> None:
        found = Restored(path)
        # Small leaves are read together, with the bytes that lie between them.
        assert found.report == RestoreReport(str(path), 10, penstock.sync.metadata(path).nbytes)
        assert found.report.nbytes <= found.store.nbytes

    def test_changes_are_told_by_events(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "penstock"):
            Restored(
                path,
                like={"n": np.ndarray, "m": 1},
                rename={"steps": "n"},
                on_missing="keep",
                on_unexpected="skip",
            )

        told = {event["event"]: event for event in (vars(record)["penstock"] for record in caplog.records)}
        assert told["restore.renamed"]["key_paths"] == ("['n']",)
        assert told["restore.kept"]["key_paths"] == ("['m']",)
        assert told["restore.skipped"]["n_leaves"] == 8


def test_leaves_of_third_parties_are_renamed_and_made_into_others(tmp_path: Path) -> None:
    registry = with_parcels(default_handlers(), ParcelHandler())
    with penstock.sync.Checkpointer(registry=registry) as checkpointer:
        checkpointer.save(tmp_path / "a", {"p": Parcel("text"), "n": 1}).result()
        found = checkpointer.restore(tmp_path / "a", rename={"p": "q", "n": None})
        assert found["q"].text == "text"

        made = Transform(original_key="p", value_fn=lambda parcel: parcel.text)
        assert checkpointer.restore(tmp_path / "a", like={"x": ""}, transforms={"x": made}) == {"x": "text"}
        with pytest.raises(StructureMismatchError, match="Parcel in the target, int64") as raised:
            checkpointer.restore(tmp_path / "a", like={"p": Parcel}, rename={"n": "p", "p": None})
        (difference,) = raised.value.differences
        assert (difference.kind, difference.key_path) == ("type", "['p']")


@pytest.mark.anyio
async def test_a_failing_restore_holds_nothing(path: Path) -> None:
    async with Checkpointer() as checkpointer:
        for options in (
            {"dtype": lambda keys: 1 / 0},
            {"transforms": {"steps": Transform(value_fn=lambda value: 1 / 0)}},
        ):
            with pytest.raises(HandlerFailedError):
                await checkpointer.restore(
                    path,
                    like={"steps": np.zeros(3, np.uint8)} if "transforms" in options else TREE,
                    **cast("Any", options),
                )

        assert checkpointer.statistics().leased == 0


# Other meshes


def run_python(program: str, path: Path, *, n_devices: int) -> Any:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(penstock.__file__).parents[1]),
        "XLA_FLAGS": xla_flags(n_devices),
    }
    command = [sys.executable, "-W", "error", "-c", program, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


RESHARD = """
import json, sys, jax, numpy as np, penstock.sync
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
n, axes = {n}, {axes}
mesh = Mesh(np.array(jax.devices()[:n]), ("x",))
like = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=NamedSharding(mesh, P(*axes)))
reports = []
found = penstock.sync.restore(sys.argv[1], like=[like], on_report=reports.append)[0]
assert found.sharding == like.sharding
assert np.asarray(found).tolist() == np.arange(128.0).reshape(16, 8).tolist()
shards = [shard.data.shape for shard in found.addressable_shards]
print(json.dumps([len(jax.devices()), reports[0].nbytes, len(shards), shards[0]]))
"""


@pytest.mark.thinned(3)
@pytest.mark.process
@pytest.mark.parametrize(
    ("saved_on", "saved_axes", "here", "axes", "shard"),
    [
        (8, ("x",), 4, ("x",), [4, 8]),
        pytest.param(8, ("x",), 4, (None, "x"), [16, 2], marks=pytest.mark.slow),
        (4, ("x",), 8, ("x",), [2, 8]),
        pytest.param(4, (None, "x"), 8, ("x",), [2, 8], marks=pytest.mark.slow),
        pytest.param(8, (), 8, ("x",), [2, 8], marks=pytest.mark.slow),
        pytest.param(8, ("x",), 8, (), [16, 8], marks=pytest.mark.slow),
        (8, ("x",), 1, (), [16, 8]),
    ],
)
def test_an_array_is_restored_onto_another_mesh_in_another_process(
    tmp_path: Path, saved_on: int, saved_axes: Any, here: int, axes: Any, shard: list[int]
) -> None:
    array = jnp.arange(128.0).reshape(16, 8)
    penstock.sync.save(tmp_path / "a", [jax.device_put(array, over(saved_on, *saved_axes))])
    program = RESHARD.format(n=here, axes=axes)
    assert run_python(program, tmp_path / "a", n_devices=here) == [here, 16 * 8 * 4, here, shard]


def test_rows_are_read_with_the_pieces_that_hold_them_and_no_others(tmp_path: Path) -> None:
    array = np.arange(16 * 1024, dtype=np.float32).reshape(16, 1024)
    penstock.sync.save(tmp_path / "a", [jax.device_put(array, over(8, "x"))])
    store: Any = CountingStore()
    stored = OrbaxLayout().open(store, str(tmp_path / "a"))
    region = HostRegion(((3, 6), (0, 1024)), np.dtype(np.float32))  # half a shard, and a whole one
    files: dict[str, Any] = {}
    for one in stored.reads(0, stored.leaves[0], region, 1 << 20):
        read = one.at_once() if isinstance(one, CheckedRead) else one
        assert isinstance(read, (DirectRead, ScatterRead))
        file = files[read.file] = files.get(read.file) or store.open_data_file(read.file)
        data = read.into() if isinstance(read, DirectRead) else memoryview(bytearray(read.nbytes))
        file.read_at(read.offset, [data])
        if isinstance(read, ScatterRead):
            read.scatter(data)

    assert region.array().tolist() == array[3:6].tolist()
    assert store.nbytes == 4 * 1024 * 4
    for file in files.values():
        file.close()
