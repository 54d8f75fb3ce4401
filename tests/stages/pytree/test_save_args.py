"""Which `SaveArgs` each leaf gets, and what is refused before a byte is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.stages.stage_rig import Parcel, ParcelHandler, Rig, files_in, save_stages, with_parcels

from penstock import PerProcess, SaveArgs, SaveFormat
from penstock.errors import HandlerFailedError, InvalidLeafError, SpecError
from penstock.handlers import OrbaxLayout
from penstock.kernel import KeyPath
from penstock.stages import Flatten
from penstock.stages.flatten import each_leaf
from penstock.stages.pytree.flattening import flatten_tree

A, B, C = SaveArgs(dtype="float16"), SaveArgs(chunk_byte_size=64), SaveArgs(shard_axes=(0,))


class Pair(NamedTuple):
    left: Any
    right: Any


def tree() -> dict[str, Any]:
    return {"a": [1.0, {"b": 2.0, "c": 3.0}], "none": None, "p": Pair(4.0, (5.0,)), "s": "text"}


def asked(save_args: object, of: object | None = None) -> dict[str, SaveArgs | None]:
    infos = [leaf.info for leaf in flatten_tree(tree() if of is None else of)[0]]
    found = each_leaf(save_args, infos)
    return dict(zip([info.name for info in infos], found, strict=True)) if found else {}


def test_a_save_without_args_has_the_defaults() -> None:
    assert asked(None) == {}
    assert set(asked({}).values()) == set(asked({"a": None, "p": ()}).values()) == {None}


def test_one_value_of_save_args_is_for_all_leaves() -> None:
    assert set(asked(A).values()) == {A}
    assert asked(A, of=1.0) == {"": A}


def test_a_prefix_of_the_tree() -> None:
    assert asked({"a": [A, {"b": B}], "p": C}) == {
        "a.0": A,
        "a.1.b": B,
        "a.1.c": None,
        "none": None,
        "p.left": C,
        "p.right.0": C,
        "s": None,
    }


def test_containers_are_compared_as_they_are_stored() -> None:
    assert asked({"a": (None, A), "p": {"left": B, "right": [C]}}) == {
        "a.0": None,
        "a.1.b": A,
        "a.1.c": A,
        "none": None,
        "p.left": B,
        "p.right.0": C,
        "s": None,
    }


def test_a_function_gets_the_stored_keys() -> None:
    seen: list[KeyPath] = []

    def function(keys: KeyPath) -> SaveArgs | None:
        seen.append(keys)
        return A if keys[-1] == "b" else None

    found = asked(function)

    assert [name for name, args in found.items() if args] == ["a.1.b"]
    assert ("p", "right", "0") in seen
    assert len(seen) == len(found)


@pytest.mark.parametrize(
    ("save_args", "key_path"),
    [
        ({"z": A}, "['z']"),
        ({"a": [A, B, C]}, "['a'][2]"),
        ({"a": [{"deeper": A}]}, "['a'][0]['deeper']"),
        ({"a": {"x": A}}, "['a']['x']"),
        ([A], "[0]"),
        ({"a": [5]}, "['a'][0]"),
        ({"p": "float16"}, "['p']"),
        (lambda keys: 5 if keys == ("a", "1", "c") else None, "['a'][1]['c']"),  # pyright: ignore[reportUnknownLambdaType]
        (lambda keys: SaveArgs(chunk_byte_size=-1), "['a'][0]"),  # pyright: ignore[reportUnknownLambdaType]
    ],
)
def test_what_does_not_fit_is_refused_with_its_key_path(save_args: object, key_path: str) -> None:
    with pytest.raises(InvalidLeafError, match="save_args") as caught:
        asked(save_args)

    assert caught.value.key_path == key_path


@pytest.mark.parametrize("save_args", [5, "float16", np.float32(1)])
def test_what_is_nothing_of_all_is_refused(save_args: object) -> None:
    with pytest.raises(SpecError, match="save_args must be a SaveArgs or None"):
        asked(save_args)


def test_what_a_function_raises_arrives_with_the_key_path() -> None:
    def broken(keys: KeyPath) -> SaveArgs:
        raise KeyError(keys[0])

    with pytest.raises(HandlerFailedError, match="broken") as caught:
        asked(broken)

    assert caught.value.key_path == "['a'][0]"
    assert isinstance(caught.value.__cause__, KeyError)


# In the stage `flatten`


async def specs(rig: Rig, value: object, save_args: object, form: SaveFormat | None = None) -> dict[str, Any]:
    rig.layout = OrbaxLayout(form)
    run = rig.save_run()
    run.request = replace(run.request, save_args=save_args)
    batches = await save_stages(run, value, Flatten())
    return {leaf.info.name: leaf.spec for batch in batches for leaf in batch.leaves}


@pytest.mark.anyio
async def test_what_a_leaf_is_stored_with(rig: Rig) -> None:
    value = {"x": jnp.ones((8, 4)), "y": np.ones((6, 4)), "z": 2.5, "s": "text"}

    found = await specs(rig, value, SaveArgs(dtype=jnp.bfloat16, chunk_byte_size=16))

    assert {name: spec.dtype for name, spec in found.items()} == {"s": "", **dict.fromkeys("xyz", "bfloat16")}
    assert (found["x"].chunk_shape, found["x"].nbytes, found["x"].itemsize) == ((2, 4), 64, 2)
    assert (found["y"].chunk_shape, found["z"].chunk_shape) == ((3, 2), ())


@pytest.mark.anyio
async def test_the_args_of_a_leaf_outrank_the_format(rig: Rig) -> None:
    value = {"x": np.ones(64, np.uint8), "y": np.ones(64, np.uint8)}

    found = await specs(rig, value, {"x": SaveArgs(chunk_byte_size=32)}, SaveFormat(chunk_byte_size=16))

    assert {name: spec.chunk_shape for name, spec in found.items()} == {"x": (32,), "y": (16,)}


@pytest.mark.anyio
async def test_the_same_tree_with_other_args_is_described_anew(rig: Rig) -> None:
    value = {"x": jnp.ones(8)}
    dtypes = [
        (await specs(rig, value, args))["x"].dtype for args in (None, A, SaveArgs(dtype="int8"), A, None)
    ]

    assert dtypes == ["float32", "float16", "int8", "float16", "float32"]


def refused() -> list[tuple[object, object, str]]:
    key: Callable[[int], Any] = jax.random.key
    return [
        ({"x": np.ones(2)}, SaveArgs(dtype="nothing"), "have no dtype 'nothing'"),
        ({"x": np.ones(2)}, SaveArgs(dtype="i4,,"), "have no dtype 'i4,,'"),
        ({"x": np.ones(2)}, SaveArgs(dtype=object), "of dtype object cannot be stored"),
        ({"x": np.ones(2)}, SaveArgs(dtype="M8[s]"), "cannot be stored"),
        ({"x": np.ones(2, np.complex64)}, SaveArgs(dtype="float32"), "imaginary"),
        ({"x": key(1)}, SaveArgs(dtype="float32"), "PRNG key"),
        ({"x": np.ones(2)}, SaveArgs(chunk_byte_size=7), "less than one element of float64"),
        ({"x": np.ones(2)}, SaveArgs(shard_axes=(1,)), r"not within shape \(2,\)"),
        ({"x": 1.5}, SaveArgs(shard_axes=(0,)), r"not within shape \(\)"),
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("case", range(9))
async def test_impossible_save_args_are_refused_before_a_byte_is_written(rig: Rig, case: int) -> None:
    value, save_args, problem = refused()[case]

    with pytest.raises(InvalidLeafError, match=problem) as caught:
        await specs(rig, value, save_args)

    assert caught.value.key_path == "['x']"
    assert files_in(rig.root) == set()


@pytest.mark.anyio
async def test_a_dtype_for_what_a_third_party_stores_is_refused(rig: Rig) -> None:
    rig.registry = with_parcels(rig.registry, ParcelHandler())

    assert (await specs(rig, {"p": Parcel("text")}, SaveArgs(chunk_byte_size=8)))["p"].shape is None


@pytest.mark.anyio
async def test_no_other_dtype_is_promised_by_a_handler_that_cannot_cast(rig: Rig) -> None:
    rig.scripted(np.ndarray)  # wraps our handler and does not support chunks

    assert (await specs(rig, {"x": np.ones(64)}, SaveArgs(chunk_byte_size=8)))["x"].chunk_shape == (64,)
    with pytest.raises(InvalidLeafError, match="another dtype") as caught:
        await specs(rig, {"x": np.ones(64)}, A)

    assert caught.value.key_path == "['x']"


@pytest.mark.parametrize("process", [(0, 1), (1, 3)])
@pytest.mark.parametrize(
    ("save_args", "found"),
    [
        ({"it": PerProcess({"x": A})}, [A, None]),
        ({"it": PerProcess(A)}, [A, A]),
        ({"it": A}, [A, A]),
    ],
)
def test_what_each_process_has(
    process: tuple[int, int], save_args: object, found: list[SaveArgs | None]
) -> None:
    leaves, _ = flatten_tree({"it": PerProcess({"x": 1.0, "y": 2.0})}, process=process)
    assert each_leaf(save_args, [leaf.info for leaf in leaves], process) == found
