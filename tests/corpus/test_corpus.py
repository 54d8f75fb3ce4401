"""Every checkpoint of tests/corpus, restored in every way: of Orbax 0.2.7 to 0.12.8, and of two processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from tests.corpus.corpora import DOCUMENTS, unpacked_orbax

import penstock
from penstock.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedFormatError

EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": ()}
CASES = sorted(DOCUMENTS)
ROOTS = [name for name in CASES if "manager" in DOCUMENTS[name]]


def items(type_: str) -> list[Any]:
    return [
        pytest.param(name, described, id=f"{name}-{described['path']}")
        for name in CASES
        for described in DOCUMENTS[name]["checkpoints"]
        if described["type"] == type_
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked_orbax(tmp_path_factory)


@pytest.fixture(scope="session")
def ours() -> Iterator[Any]:
    with penstock.sync.Checkpointer() as checkpointer:
        yield checkpointer


def dtype_of(leaf: Any) -> np.dtype[Any]:
    name: Any = leaf["dtype"]
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, None) or name)
    return dtype


def as_recorded(leaf: Any) -> Any:
    """A target that asks for the type that was saved."""
    if leaf.get("empty"):
        return EMPTY[leaf["value_type"]]
    if leaf["value_type"] == "string":
        return ""
    if "prng_impl" in leaf:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf["prng_impl"]))
        return jax.ShapeDtypeStruct(leaf["shape"][:-1], key.dtype)  # type: ignore[no-untyped-call]  # jax's
    if leaf["value_type"] == "jax.Array":
        return jax.ShapeDtypeStruct(leaf["shape"], dtype_of(leaf))  # type: ignore[no-untyped-call]  # jax's

    return dtype_of(leaf).type if leaf["value_type"] == "scalar" else np.empty(leaf["shape"], dtype_of(leaf))


def as_numpy(leaf: Any) -> Any:
    """A target that asks for arrays on the host, whatever was saved."""
    if leaf.get("empty") or leaf["value_type"] == "string":
        return as_recorded(leaf)

    return np.empty(leaf["shape"], dtype_of(leaf))


def nested(leaves: Any, make: Callable[[Any], Any]) -> Any:
    """A tree of what `make` gives for each leaf."""
    if not leaves[0]["path"]:
        return make(leaves[0])

    below: dict[str, list[Any]] = {}
    for leaf in leaves:
        (key, _), *rest = leaf["path"]
        below.setdefault(key, []).append({**leaf, "path": rest})
    children = {key: nested(inner, make) for key, inner in below.items()}
    return (
        children if leaves[0]["path"][0][1] == "dict" else [children[str(at)] for at in range(len(children))]
    )


def is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def at(tree: Any, path: Any) -> Any:
    for key, kind in path:
        tree = tree[key if kind == "dict" else int(key)]
    return tree


def assert_holds(tree: Any, described: Any, npz: Any) -> None:
    """Each leaf is there with its bits; a number that came back as Python's has its value."""
    count = len(jax.tree.leaves(tree, is_leaf=is_empty))
    assert count == len(described["leaves"])
    for leaf in described["leaves"]:
        found = at(tree, leaf["path"])
        if leaf.get("empty"):
            assert found == EMPTY[leaf["value_type"]]
        elif leaf["value_type"] == "string":
            assert found == leaf["value"]
        elif isinstance(found, int | float | complex) and not isinstance(found, np.generic):
            assert np.asarray(found, dtype_of(leaf)).tobytes() == npz[leaf["npz"]].tobytes()
        else:
            if "prng_impl" in leaf and isinstance(found, jax.Array) and found.dtype != np.uint32:
                assert str(jax.random.key_impl(found)) == leaf["prng_impl"]
                found = jax.random.key_data(found)
            assert (list(found.shape), found.dtype) == (leaf["shape"], dtype_of(leaf))
            assert np.asarray(found).tobytes() == npz[leaf["npz"]].tobytes()


@pytest.mark.parametrize(("case", "described"), items("pytree"))
@pytest.mark.parametrize("target", [None, as_recorded, as_numpy], ids=["no target", "as recorded", "numpy"])
def test_a_tree_comes_back(case: str, described: Any, target: Any, corpus: Path, ours: Any) -> None:
    options = {} if target is None else {"like": nested(described["leaves"], target)}

    tree = ours.restore(corpus / "corpus" / case / described["path"], **options)

    assert_holds(tree, described, np.load(corpus / "corpus" / case / "expected.npz"))
    if target is not None:
        structure: Any = jax.tree.structure
        assert structure(tree) == structure(options["like"])


@pytest.mark.parametrize(("case", "described"), items("pytree"))
def test_what_a_tree_is_can_be_told_without_reading_it(
    case: str, described: Any, corpus: Path, ours: Any
) -> None:
    found = ours.metadata(corpus / "corpus" / case / described["path"])

    assert {leaf.name for leaf in found.leaves} == {leaf["name"] for leaf in described["leaves"]}
    for leaf in described["leaves"]:
        metadata = at(found.tree, leaf["path"])
        assert metadata.name == leaf["name"]
        assert metadata.shape == (tuple(leaf["shape"]) if "shape" in leaf else None)
        assert metadata.dtype == leaf.get("dtype", "")
        assert metadata.random_key_impl == leaf.get("prng_impl")
        if case != "old_0_2_7_fs":  # which recorded no types
            assert metadata.kind == leaf["value_type"]


@pytest.mark.parametrize(("case", "described"), items("json"))
def test_a_json_item_comes_back(case: str, described: Any, corpus: Path, ours: Any) -> None:
    path = corpus / "corpus" / case / described["path"]

    assert ours.restore(path) == described["value"]
    assert ours.restore(path, like=described["value"]) == described["value"]
    if path.name != "ckpt":
        assert ours.restore(path.parent, item=path.name) == described["value"]


@pytest.mark.parametrize(("case", "described"), items("proto"))
def test_a_message_comes_back_as_its_text(case: str, described: Any, corpus: Path, ours: Any) -> None:
    path = corpus / "corpus" / case / described["path"]

    assert ours.restore(path) == ours.restore(path, like=str) == (path / "proto.pbtxt").read_text()


@pytest.mark.parametrize("case", ROOTS)
def test_of_a_directory_of_steps_the_latest_is_taken(case: str, corpus: Path, ours: Any) -> None:
    manager = DOCUMENTS[case]["manager"]
    root = corpus / "corpus" / case / manager["root"]
    step = max(path for path in root.iterdir() if path.name.endswith(f"{manager['steps'][-1]}"))
    (described,) = [
        tree
        for tree in DOCUMENTS[case]["checkpoints"]
        if Path(tree["path"]).parent.name == step.name
        and Path(tree["path"]).name in ("default", "state", "pytree")
    ]

    assert_holds(ours.restore(root), described, np.load(corpus / "corpus" / case / "expected.npz"))
    assert_holds(
        ours.restore(root, item=Path(described["path"]).name),
        described,
        np.load(corpus / "corpus" / case / "expected.npz"),
    )
    found = ours.metadata(root)
    assert found.path == str(step)
    assert found.root_custom_metadata == manager.get("root_custom_metadata")


@pytest.mark.parametrize(
    "named",
    ["{0}", "{0}/", "./{0}", "../{1}/{0}", "~/{0}", "file://{2}/{0}", "file://localhost{2}/{0}", "link/{0}"],
)
@pytest.mark.parametrize("inner", ["", "/2", "/2/default"], ids=["root", "step", "item"])
def test_a_path_may_be_written_in_many_ways(
    named: str, inner: str, corpus: Path, ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(corpus / "corpus" / "v0_manager_default" / "ckpt", tmp_path / "here")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    path = named.format(f"here{inner}", tmp_path.name, tmp_path)

    (described,) = [
        tree for tree in DOCUMENTS["v0_manager_default"]["checkpoints"] if tree["path"] == "ckpt/2/default"
    ]
    npz = np.load(corpus / "corpus" / "v0_manager_default" / "expected.npz")
    assert_holds(ours.restore(path), described, npz)
    assert len(ours.metadata(path).leaves) == len(described["leaves"])


@pytest.mark.parametrize("case", CASES)
def test_custom_metadata_of_tree_and_step_is_told(case: str, corpus: Path, ours: Any) -> None:
    for described in DOCUMENTS[case]["checkpoints"]:
        facts = {**DOCUMENTS[case], **described}
        path = corpus / "corpus" / case / described["path"]
        item = path.name if (path.parent / "_CHECKPOINT_METADATA").is_file() else None
        found = ours.metadata(path.parent if item else path, item=item)

        assert found.tree_custom_metadata == facts.get("pytree_custom_metadata")
        if "step_custom_metadata" in facts:
            assert found.custom_metadata == facts["step_custom_metadata"]


def test_random_keys_come_back_as_what_they_were(corpus: Path, ours: Any) -> None:
    step = corpus / "corpus" / "v0_manager_items" / "ckpt" / "ckpt_00003"
    npz = np.load(step.parents[1] / "expected.npz")

    typed, raw, state = (ours.restore(step, item=name) for name in ("key", "keyraw", "npkey"))

    assert jax.random.key_impl(typed) == "threefry2x32"
    assert np.asarray(jax.random.key_data(typed)).tobytes() == npz["a4"].tobytes()
    assert (raw.dtype, np.asarray(raw).tobytes()) == (np.uint32, npz["a5"].tobytes())
    assert type(state) is tuple
    np.random.RandomState().set_state(state)  # it is the state of such a one
    assert ours.restore(step, item="key", like=jax.random.key(0)) == typed


def test_items_that_are_not_named_are_listed(corpus: Path, ours: Any) -> None:
    path = corpus / "corpus" / "v1_checkpointables" / "ckpt"

    with pytest.raises(UnsupportedFormatError, match=r"2 trees \(model, tree\); name one"):
        ours.restore(path)
    with pytest.raises(NotACheckpointError, match=r"no item 'x' \(its items: cfg, model, proto, tree\)"):
        ours.restore(path, item="x")
    assert ours.restore(path, item="tree") == {"a": 1, "b": "z"}


@pytest.mark.parametrize("name", ["pytree_ocdbt_zarr3", "manager/1/state", "manager/2", "manager"])
@pytest.mark.parametrize("target", [False, True], ids=["no target", "target"])
def test_what_several_processes_wrote_comes_back(name: str, target: bool, corpus: Path, ours: Any) -> None:
    npz = dict(np.load(corpus / "corpus_mp" / "expected.npz"))
    npz["bf"] = npz.pop("bf_u16").view(ml_dtypes.bfloat16)
    like: dict[str, Any] = {"nested": {}, "step": int}
    for key, array in npz.items():
        (like["nested"] if "." in key else like)[key.rpartition(".")[2]] = np.empty_like(array)
    if name == "pytree_ocdbt_zarr3":
        like["name"] = ""

    tree = ours.restore(corpus / "corpus_mp" / name, **({"like": like} if target else {}))

    for key, array in npz.items():
        found = np.asarray(at(tree, [(step, "dict") for step in key.split(".")]))
        assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes())


@pytest.mark.parametrize(
    ("lost", "problem"),
    [
        ("manifest.ocdbt", r"its parts were never merged \(ocdbt.process_0, ocdbt.process_1\)"),
        ("ocdbt.process_1", r"ocdbt.process_1/d/[0-9a-f]{32}: is missing"),
        ("ocdbt.process_0/d", r"ocdbt.process_0/d/[0-9a-f]{32}: is missing"),
    ],
)
def test_a_part_that_is_missing_is_named(
    lost: str, problem: str, corpus: Path, ours: Any, tmp_path: Path
) -> None:
    shutil.copytree(corpus / "corpus_mp" / "pytree_ocdbt_zarr3", tmp_path / "x")
    target = tmp_path / "x" / lost
    shutil.rmtree(target) if target.is_dir() else target.unlink()

    with pytest.raises(CorruptCheckpointError, match=problem):
        ours.restore(tmp_path / "x")
