"""Both directions with Orbax 0.12.8 and its default options, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from orbax.checkpoint.experimental import v1 as ocp_v1
from tests.interop.matrix import by_orbax as orbax

import penstock
from penstock import SaveFormat

Compare = Callable[[Any, Any], None]
ToPlain = Callable[[Any], Any]

pytestmark = [
    # Orbax warns whenever it takes shardings from the file, which is what is tried here.
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    # ... and that a default is about to change: `PyTreeCheckpointer` is its oldest name.
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning:orbax"),
]


def v0_pytree_save(path: Path, tree: Any) -> Path:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def v0_standard_save(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def v0_manager_save(path: Path, tree: Any) -> Path:
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.PyTreeSave(tree))
    return path / "3"


def v1_save(path: Path, tree: Any) -> Path:
    ocp_v1.save(str(path), tree)
    return path


def v0_pytree_load(path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def v0_standard_load(path: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def v1_load(path: Path) -> Any:
    return ocp_v1.load(str(path))


def without_strings(tree: Any) -> Any:
    """For v0's StandardCheckpointer, which refuses them."""
    return {
        **{name: value for name, value in tree.items() if name != "strings"},
        "names": {name: value for name, value in tree["names"].items() if not isinstance(value, str)},
    }


SAVES: dict[str, Callable[[Path, Any], Path]] = {
    "v0 PyTree": v0_pytree_save,
    "v0 Standard": v0_standard_save,
    "v0 manager": v0_manager_save,
    "v1": v1_save,
}
LOADS: dict[str, Callable[[Path], Any]] = {
    "v0 PyTree": v0_pytree_load,
    "v0 Standard": v0_standard_load,
    "v1": v1_load,
}


@pytest.fixture(scope="module", params=SAVES)
def by_orbax(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tree: Any) -> Any:
    """A path at which Orbax saved a tree, and that tree."""
    if request.param == "v0 Standard":
        tree = without_strings(tree)
    return SAVES[request.param](tmp_path_factory.mktemp("orbax") / "ckpt", tree), tree


class TestPenstockReadsOrbax:
    def test_without_a_target(self, by_orbax: Any, ours: Any, compare: Compare, to_plain: ToPlain) -> None:
        path, tree = by_orbax
        compare(ours.restore(path), to_plain(tree))

    def test_with_a_target(self, by_orbax: Any, ours: Any, compare: Compare) -> None:
        path, tree = by_orbax
        compare(ours.restore(path, like=tree), tree)

    def test_metadata(self, by_orbax: Any, ours: Any) -> None:
        path, tree = by_orbax
        described = {leaf.name: leaf for leaf in ours.metadata(path).leaves}
        host = tree["host"]
        assert all(described[f"host.{name}"].dtype == name for name in host)
        assert all(described[f"host.{name}"].shape == array.shape for name, array in host.items())
        assert [described[f"keys.{n}"].random_key_impl for n in range(4)] == [
            "threefry2x32",
            "rbg",
            "unsafe_rbg",
            None,
        ]


class TestOrbaxReadsPenstock:
    @pytest.mark.parametrize("name", LOADS)
    def test_without_a_target(
        self, by_penstock: Path, tree: Any, compare: Compare, to_plain: ToPlain, name: str
    ) -> None:
        compare(LOADS[name](by_penstock), to_plain(tree))

    def test_with_a_target(self, by_penstock: Path, tree: Any, compare: Compare) -> None:
        restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.restore(by_penstock, item=tree, restore_args=restore_args)
        compare(found, tree)

        def abstract(leaf: Any) -> Any:
            to_struct: Any = ocp.utils.to_shape_dtype_struct
            return to_struct(leaf) if isinstance(leaf, jax.Array) else leaf

        compare(ocp_v1.load(str(by_penstock), jax.tree.map(abstract, tree)), tree)

    @pytest.mark.parametrize("name", LOADS)
    def test_what_orbax_could_not_have_written(
        self,
        tmp_path: Path,
        tree_orbax_cannot_write: Any,
        compare: Compare,
        name: str,
    ) -> None:
        tree = dict(tree_orbax_cannot_write)
        if name == "v0 Standard":
            del tree["c"]  # it cannot read a Python complex either, unless told to make an array of it
        penstock.sync.save(tmp_path / "a", tree)
        compare(LOADS[name](tmp_path / "a"), tree)

    def test_as_the_default_item_of_a_step(
        self, tmp_path: Path, tree: Any, compare: Compare, to_plain: ToPlain
    ) -> None:
        penstock.sync.save(tmp_path / "7" / "default", tree)
        with ocp.CheckpointManager(tmp_path) as manager:
            assert manager.latest_step() == 7
            compare(manager.restore(7, args=ocp.args.PyTreeRestore()), to_plain(tree))

    def test_metadata(self, tmp_path: Path) -> None:
        """Not of the common tree: v1 of 0.12.8 fails on the metadata of any bool, its own included."""
        tree = {"a": jnp.ones((2, 3)), "s": "text"}
        penstock.sync.save(tmp_path / "a", tree, custom_metadata={"lr": [0.5]})
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            v0 = checkpointer.metadata(tmp_path / "a")
        v1 = ocp_v1.metadata(str(tmp_path / "a"))
        assert v0.custom_metadata == v1.custom_metadata == {"lr": [0.5]}
        assert v0.item_metadata.tree["a"].shape == v1.metadata["a"].shape == (2, 3)
        assert v1.commit_timestamp_nsecs == penstock.sync.metadata(tmp_path / "a").committed_at_ns

    @pytest.mark.parametrize("name", LOADS)
    @pytest.mark.parametrize("leaf", ["array", "numpy", "int"])
    def test_a_bare_leaf(self, tmp_path: Path, compare: Compare, name: str, leaf: str) -> None:
        value = {"array": jnp.arange(3), "numpy": np.arange(3), "int": 5}[leaf]
        penstock.sync.save(tmp_path / "a", value)
        compare(LOADS[name](tmp_path / "a"), value)


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="./~\\"), max_size=5)
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 100, shape).astype(dtype),
    st.sampled_from(["int8", "uint16", "float32", "float64", "bool", "complex64"]),
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    st.integers(0, 99),
)
LEAVES = st.one_of(
    ARRAYS,
    ARRAYS.filter(lambda array: array.dtype != np.float64).map(jnp.asarray),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.sampled_from([None, {}, [], ()]),
)
TREES = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES,
        lambda inner: st.dictionaries(NAMES, inner, max_size=3) | st.lists(inner, max_size=3),
        max_leaves=6,
    ),
    min_size=1,
    max_size=4,
)


# Arrays from 16 KiB on may have a codec.
LARGE = st.builds(
    lambda shape, seed: np.random.default_rng(seed).integers(0, 9, shape).astype(np.float32),
    st.sampled_from([(4096,), (60, 80), (5, 4, 300)]),
    st.integers(0, 99),
)
FORMATS = st.builds(
    SaveFormat,
    ocdbt=st.booleans(),
    zarr=st.sampled_from([2, 3]),
    codec=st.sampled_from(["none", "zstd", "auto"]),
    chunk_byte_size=st.none() | st.integers(6000, 20_000),
    ocdbt_target_data_file_size=st.sampled_from([None, 0, 5000]),
)
OPTIONS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("use_ocdbt", "use_zarr3", "use_compression")},
    optional={"chunk_byte_size": st.integers(6000, 20_000)},
)


def orbax_save(version: str, path: Path, tree: Any, options: dict[str, Any]) -> None:
    size = options.pop("chunk_byte_size", None)
    if version == "v1":
        orbax.v1_save(**options, storage_options__chunk_byte_size=size)(path, tree)
    else:
        orbax.v0_pytree(lambda _: ocp.SaveArgs(chunk_byte_size=size), **options)(path, tree)


@pytest.mark.parametrize("version", ["v0 PyTree", "v1"])
def test_any_tree_both_ways(
    tmp_path_factory: pytest.TempPathFactory, ours: Any, compare: Compare, to_plain: ToPlain, version: str
) -> None:
    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(tree=TREES, large=LARGE, form=FORMATS, options=OPTIONS)
    def check(tree: Any, large: Any, form: SaveFormat, options: dict[str, Any]) -> None:
        # In directories an array without a name lies where those of the others are: its files may have
        # their names. penstock refuses that (tests/handlers/layout), Orbax fails in the middle of it.
        assume("" not in tree or (form.ocdbt and options["use_ocdbt"]))
        folder = tmp_path_factory.mktemp("any")
        tree = {**tree, "large array": large}
        with penstock.sync.Checkpointer(save_format=form) as checkpointer:
            checkpointer.save(folder / "ours", tree).result()
        compare(LOADS[version](folder / "ours"), to_plain(tree))

        orbax_save(version, folder, tree, dict(options))
        compare(ours.restore(folder / "a"), to_plain(tree))
        compare(ours.restore(folder / "a", like=tree), tree)

    check()
