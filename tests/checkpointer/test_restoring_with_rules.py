"""A restore makes other leaves of what is stored, as rules say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.plain_rules import apply_plainly, same_bits

import penstock
from penstock.errors import RulesError, SpecError, StructureMismatchError
from penstock.rules import Cast, Concat, Constant, Rename, Rules, Split, Stack, Transpose

RANDOM = np.random.default_rng(1)
TREE: dict[str, Any] = {
    "layers": [
        {"w": RANDOM.normal(size=(16, 24)).astype(np.float32), "b": np.full(8, at, np.float32)}
        for at in range(4)
    ],
    "embed": RANDOM.normal(size=(64, 32)).astype(np.float32),
    "head": RANDOM.normal(size=(16, 8)).astype(np.float32),
}
RULES = [
    Stack("layers.{i:int}.w", "layers.w", axis=2),
    Concat("layers.{i:int}.b", "layers.b"),
    Transpose("embed", "table"),
    Split("head", ["head.q", "head.k"], axis=1),
    Cast("head.q", dtype="bfloat16"),
    Constant("scale", value=2, shape=(8, 8)),
]
NAMES = [("layers", "w"), ("layers", "b"), ("table",), ("head", "q"), ("head", "k"), ("scale",)]


def stored_names() -> dict[str, Any]:
    layers = enumerate(TREE["layers"])
    found = {f"layers.{at}.{name}": leaf for at, each in layers for name, leaf in each.items()}
    return {**found, "embed": TREE["embed"], "head": TREE["head"]}


WANTED = apply_plainly(RULES, stored_names())


@pytest.fixture(params=["plain", "coded", "directories", "safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "safetensors":
        penstock.sync.export_safetensors(TREE, tmp_path / "source.safetensors")
        return tmp_path / "source.safetensors"

    form = {
        "plain": penstock.SaveFormat(),
        "coded": penstock.SaveFormat(codec="zstd:1"),
        "directories": penstock.SaveFormat(ocdbt=False, zarr=3),
    }[request.param]
    with penstock.sync.Checkpointer(save_format=form) as checkpointer:
        checkpointer.save(tmp_path / "source", TREE).result()

    return tmp_path / "source"


def like_of(make: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for keys in NAMES:
        inner = tree
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})

        array = WANTED[".".join(keys)]
        inner[keys[-1]] = make(array.shape, array.dtype)

    return tree


def check(found: Any) -> None:
    for keys in NAMES:
        value: Any = found
        for key in keys:
            value = value[key]

        assert same_bits(np.asarray(value), WANTED[".".join(keys)]), keys


async def test_a_target_of_numpy_arrays_gets_what_rules_make(path: Path) -> None:
    check(await penstock.restore(path, like=like_of(np.zeros), rules=RULES))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("memory", ["1GiB", "64KiB"])
@pytest.mark.parametrize("axes", [("x",), (None, "x"), ("x", "y"), ("y", "x"), ()])
async def test_a_mesh_of_devices_gets_what_rules_make(path: Path, axes: Any, memory: str) -> None:
    devices: Any = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh = Mesh(devices, ("x", "y"))

    def make(shape: tuple[int, ...], dtype: Any) -> Any:
        named = enumerate(axes[: len(shape)])
        names = [name if name and not shape[at] % mesh.shape[name] else None for at, name in named]
        sharding = NamedSharding(mesh, PartitionSpec(*names))  # type: ignore[no-untyped-call]  # jax's
        struct: Any = jax.ShapeDtypeStruct
        return struct(shape, dtype, sharding=sharding)

    like = like_of(make)
    async with penstock.Checkpointer(memory_limit=memory) as checkpointer:
        found = await checkpointer.restore(path, like=like, rules=RULES)

    check(found)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == shardings


async def test_without_a_target_the_result_has_the_names_that_rules_give(path: Path) -> None:
    split = None if path.suffix == "" else "."
    check(await penstock.restore(path, rules=RULES, split=split))


async def test_mapped_leaves_that_rules_only_rename_stay_mapped(tmp_path: Path) -> None:
    tree = {"a": RANDOM.normal(size=(64, 64)), "b": RANDOM.normal(size=(64, 64))}
    await penstock.save(tmp_path / "source", tree)
    rules = [Rename("a", "c"), Transpose("b", "d")]
    like: Any = {"c": np.ndarray, "d": np.ndarray}
    found = await penstock.restore(tmp_path / "source", rules=rules, mmap=True, like=like)
    assert same_bits(found["c"], tree["a"])
    assert same_bits(found["d"], tree["b"].T)
    assert not found["c"].flags.writeable


async def test_the_target_says_which_leaves_are_wanted(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "source", {"a": np.ones(3), "b": np.ones(2), "c": np.ones(1)})
    like = {"x": np.zeros(3), "b": np.zeros(2), "y": np.zeros(4)}
    with pytest.raises(StructureMismatchError) as raised:
        await penstock.restore(tmp_path / "source", like=like, rules=[Rename("a", "x")])

    assert [(each.kind, each.key_path) for each in raised.value.differences] == [
        ("missing", "['y']"),
        ("unexpected", "['c']"),
    ]
    del like["y"]
    found = await penstock.restore(
        tmp_path / "source", like=like, rules=[Rename("a", "x")], on_unexpected="skip"
    )
    assert sorted(found) == ["b", "x"]


async def test_a_rule_that_finds_nothing_is_an_error_with_a_target_too(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "source", {"a": np.ones(3)})
    with pytest.raises(RulesError, match="no leaf is named 'b'"):
        await penstock.restore(tmp_path / "source", like={"a": np.zeros(3)}, rules=[Rename("b", "c")])


async def test_other_options_see_what_rules_made(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "source", {"a": np.ones((3, 2), np.float32), "b": np.ones(2)})
    rules = Rules([Transpose("a", "deep.a")], rest="keep")
    found = await penstock.restore(
        tmp_path / "source", rules=rules, only="deep", rename={"deep.a": "top"}, dtype=jnp.bfloat16
    )
    assert list(found) == ["top"]
    assert (found["top"].shape, found["top"].dtype) == ((2, 3), jnp.bfloat16)


async def test_many_small_leaves_with_other_names_travel_together(tmp_path: Path) -> None:
    tree = {f"leaf{at}": np.full(4, at) for at in range(300)}
    await penstock.save(tmp_path / "source", tree)
    reports: list[penstock.RestoreReport] = []
    found = await penstock.restore(
        tmp_path / "source", rules=[Rename("leaf{i}", "{i}")], on_report=reports.append
    )
    assert all(same_bits(found[str(at)], np.full(4, at)) for at in range(300))
    assert reports[0].n_leaves == 300


async def test_a_manager_restores_a_step_with_rules(tmp_path: Path) -> None:
    async with penstock.CheckpointManager(tmp_path / "run") as manager:
        save = await manager.save(1, {"a": np.arange(6).reshape(2, 3)})
        assert save is not None
        await save
        found = await manager.restore(1, rules=[Transpose("a", "b")])

    assert same_bits(found["b"], np.arange(6).reshape(2, 3).T)


async def test_what_is_no_rule_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="sequence of rules"):
        await penstock.restore(tmp_path / "none", rules="rules.toml")  # type: ignore[arg-type]
