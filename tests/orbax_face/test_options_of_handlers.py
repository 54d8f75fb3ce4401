"""What options of handlers, checkpointers and leaves do, on both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as _orbax
import pytest
from etils import epath
from tests.orbax_face.shown_options import Cases, Shown, refused, values

import penstock.orbax as _penstock

ours: Any = _penstock
theirs: Any = _orbax  # it has no types
_jax: Any = jax
CASES = Cases()
GIB = 10**9
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")


def a_tree() -> dict[str, Any]:
    return {"a": jnp.arange(6.0), "b": {"c": np.arange(4, dtype=np.int16), "n": 3}}


def files(path: Path) -> list[str]:
    """The files of a checkpoint that both libraries write, without those of a database."""
    found = sorted(str(one.relative_to(path)) for one in path.rglob("*") if one.is_file())
    return [name for name in found if "ocdbt" not in name and "_PENSTOCK" not in name and "/d/" not in name]


class Word:
    """A leaf whose handler looks at what it is told."""


def looking_at(ocp: Any, seen: list[Any], look: Any) -> Any:
    """A registry whose handler of `Word` notes what it sees of each call."""

    class Looking(ocp.type_handlers.TypeHandler):  # type: ignore[misc]  # of either library
        def typestr(self) -> str:
            return "Word"

        async def metadata(self, infos: Any) -> Any:
            return [ocp.metadata.Metadata(name=info.name, directory=info.parent_dir) for info in infos]

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            seen.append(("save", look(infos[0])))
            (epath.Path(infos[0].parent_dir) / "word").write_text("word")
            return [ocp.future.NoopFuture()]

        async def deserialize(self, infos: Any, args: Any = None) -> Any:
            seen.append(("restore", look(infos[0])))
            return [Word() for _ in infos]

    types = ocp.type_handlers
    return types.create_type_handler_registry(
        (Word, Looking()), (np.ndarray, types.NumpyHandler()), (jax.Array, types.ArrayHandler())
    )


def most_bytes(info: Any) -> tuple[Any, Any]:
    def of(limiter: Any) -> Any:
        return getattr(limiter, "max_bytes", getattr(limiter, "_max_bytes", None))

    return of(info.byte_limiter), of(info.device_host_byte_limiter)


def name_of(info: Any) -> str:
    return str(info.name)


def bounds(ocp: Any, root: Path, handler: Any, seen: list[Any], save: int, restore: int) -> list[Any]:
    """Whether a save and a restore give handlers a limiter of so many bytes. penstock has one budget."""
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(root / "one", {"w": Word(), "x": np.ones(2)})
        checkpointer.restore(root / "one")
    wanted = {"save": save, "restore": restore}
    return [(what, wanted[what] in of) for what, of in seen[:2]]


@CASES.shows("PyTreeCheckpointHandler.save_concurrent_gb", "PyTreeCheckpointHandler.restore_concurrent_gb")
def limits_in_gigabytes(ocp: Any, root: Path) -> Any:
    seen: list[Any] = []
    registry = looking_at(ocp, seen, most_bytes)
    handler = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=2, restore_concurrent_gb=1, type_handler_registry=registry
    )
    return bounds(ocp, root, handler, seen, 2 * GIB, GIB)


@CASES.shows(
    "PyTreeCheckpointHandler.save_device_host_concurrent_gb",
    "PyTreeCheckpointHandler.memory_limit_options",
    "options.MemoryLimitOptions.max_transfer_concurrent_gb",
)
def automatic_limits_need_a_limit(ocp: Any, root: Path) -> Any:
    del root
    most = ocp.options.MemoryLimitOptions(max_transfer_concurrent_gb=20)
    return [
        refused(ocp.PyTreeCheckpointHandler, save_device_host_concurrent_gb="auto"),
        refused(
            ocp.PyTreeCheckpointHandler, save_device_host_concurrent_gb="auto", memory_limit_options=most
        ),
        refused(ocp.PyTreeCheckpointHandler, save_device_host_concurrent_gb=1),
    ]


@CASES.shows("PyTreeCheckpointHandler.handler_impl", "PyTreeCheckpointHandler.type_handler_registry")
def another_implementation(ocp: Any, root: Path) -> Any:
    seen: list[Any] = []
    base = ocp.BasePyTreeCheckpointHandler(
        type_handler_registry=looking_at(ocp, seen, lambda info: info.name)
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(handler_impl=base)) as checkpointer:
        checkpointer.save(root / "one", {"w": Word(), "x": np.ones(2)})
    return seen


@CASES.shows(
    "PyTreeCheckpointer.use_ocdbt",
    "PyTreeCheckpointer.use_zarr3",
    "PyTreeCheckpointer.use_compression",
    "StandardCheckpointHandler.use_ocdbt",
    "BasePyTreeCheckpointHandler.use_ocdbt",
    "BasePyTreeCheckpointHandler.use_zarr3",
    "BasePyTreeCheckpointHandler.use_compression",
)
def forms_of_arrays(ocp: Any, root: Path) -> Any:
    found: list[Any] = []
    for n, options in enumerate(
        (
            {"use_ocdbt": False},
            {"use_ocdbt": False, "use_zarr3": True},
            {"use_ocdbt": False, "use_compression": False},
        )
    ):
        for kind in (ocp.PyTreeCheckpointer, lambda **given: ocp.Checkpointer(base(ocp, **given))):
            path = root / f"{n}-{kind is ocp.PyTreeCheckpointer}"
            with kind(**options) as checkpointer:
                saved(ocp, checkpointer, path)
            found.append(sorted(p.name for p in (path / "a").iterdir()))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(root / "standard", a_tree())
    return found, (root / "standard" / "a").is_dir()


def base(ocp: Any, **options: Any) -> Any:
    return ocp.PyTreeCheckpointHandler(handler_impl=ocp.BasePyTreeCheckpointHandler(**options))


def saved(ocp: Any, checkpointer: Any, path: Path) -> None:
    checkpointer.save(path, args=ocp.args.PyTreeSave(a_tree()))


@CASES.shows(
    "JsonCheckpointHandler.filename",
    "ProtoCheckpointHandler.filename",
    "ArrayCheckpointHandler.checkpoint_name",
    "NumpyRandomKeyCheckpointHandler.key_name",
    "JaxRandomKeyCheckpointHandler.key_name",
    "args.JsonRestore.item",
)
def names_of_files(ocp: Any, root: Path) -> Any:
    from google.protobuf.struct_pb2 import Value

    found: list[Any] = []
    for name, handler, save, restore in (
        (
            "json",
            ocp.JsonCheckpointHandler(filename="mine"),
            ocp.args.JsonSave({"a": 1}),
            ocp.args.JsonRestore({"a": 9}),
        ),
        (
            "proto",
            ocp.handlers.ProtoCheckpointHandler(filename="mine.pb"),
            ocp.args.ProtoSave(Value(string_value="x")),
            ocp.args.ProtoRestore(Value),
        ),
        (
            "array",
            ocp.ArrayCheckpointHandler(checkpoint_name="mine"),
            ocp.args.ArraySave(np.arange(3)),
            ocp.args.ArrayRestore(restore_args=ocp.RestoreArgs(dtype=np.float32)),
        ),
        (
            "numpy key",
            ocp.NumpyRandomKeyCheckpointHandler(key_name="mine"),
            ocp.args.NumpyRandomKeySave(np.random.RandomState(1).get_state()),
            ocp.args.NumpyRandomKeyRestore(),
        ),
        (
            "jax key",
            ocp.JaxRandomKeyCheckpointHandler(key_name="mine"),
            ocp.args.JaxRandomKeySave(jax.random.PRNGKey(3)),
            ocp.args.JaxRandomKeyRestore(),
        ),
    ):
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(root / name, args=save)
            back = checkpointer.restore(root / name, args=restore)
        there = sorted(p.name for p in (root / name).iterdir() if "mine" in p.name)
        found.append((there, values(back) if name in ("array", "jax key") else str(back)))
    return found


@CASES.shows(
    "JsonCheckpointHandler.async_save.item",
    "ProtoCheckpointHandler.async_save.item",
    "ArrayCheckpointHandler.async_save.item",
    "ArrayCheckpointHandler.async_save.save_args",
    "PyTreeCheckpointHandler.async_save.item",
    "PyTreeCheckpointHandler.async_save.save_args",
    "StandardCheckpointHandler.async_save.item",
    "StandardCheckpointHandler.async_save.save_args",
    "args.ArraySave.save_args",
    "args.StandardSave.save_args",
)
def saving_without_an_object_of_arguments(ocp: Any, root: Path) -> Any:
    from google.protobuf.struct_pb2 import Value

    half = ocp.SaveArgs(dtype=np.float16)

    async def save(handler: Any, name: str, *args: Any, **keywords: Any) -> Any:
        directory = epath.Path(root / name)
        directory.mkdir()
        for future in await handler.async_save(directory, *args, **keywords) or ():
            await anyio.to_thread.run_sync(future.result)
        if hasattr(handler, "finalize"):
            handler.finalize(directory)
        return directory

    async def all_of_them() -> list[Any]:
        tree = {"a": np.ones(3)}
        halves = {"a": half}
        made = [
            (ocp.JsonCheckpointHandler(), "json", ({"a": 1},)),
            (ocp.handlers.ProtoCheckpointHandler("x"), "proto", (Value(number_value=2.0),)),
            (ocp.ArrayCheckpointHandler(), "array", (np.ones(3), half)),
            (ocp.PyTreeCheckpointHandler(use_ocdbt=False), "tree", (tree, halves)),
            (ocp.StandardCheckpointHandler(use_ocdbt=False), "standard", (tree, halves)),
        ]
        places = [await save(handler, name, *given) for handler, name, given in made]
        array = ocp.ArrayCheckpointHandler()
        places.append(await save(array, "array args", args=ocp.args.ArraySave(np.ones(3), half)))
        standard = ocp.StandardCheckpointHandler(use_ocdbt=False)
        places.append(await save(standard, "standard args", args=ocp.args.StandardSave(tree, halves)))
        return places

    places = anyio.run(all_of_them)
    found: list[Any] = [(place.name, files(Path(place))) for place in places[:1]]
    array = ocp.ArrayCheckpointHandler()
    found += [str(array.restore(places[at]).dtype) for at in (2, 5)]
    found.append(values(ocp.PyTreeCheckpointHandler().restore(places[3])))
    found += [values(ocp.StandardCheckpointHandler().restore(places[at])) for at in (4, 6)]
    return found


@CASES.shows(
    "args.StandardRestore.strict",
    "args.StandardRestore.support_layout",
    "args.StandardRestore.fallback_sharding",
)
def restoring_onto_structs(ocp: Any, root: Path) -> Any:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    wider: Any = {"a": _jax.ShapeDtypeStruct((8,), np.float32, sharding=place)}
    same: Any = {"a": jnp.zeros(6)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "one", {"a": jnp.arange(6.0)})
        checkpointer.wait_until_finished()
    handler = ocp.StandardCheckpointHandler()
    restore = ocp.args.StandardRestore
    path = epath.Path(root / "one")
    padded = handler.restore(path, args=restore(wider, strict=False))
    laid = handler.restore(path, args=restore(same, support_layout=True))
    told = handler.restore(path, args=restore(fallback_sharding=place))  # not needed: its devices are here
    return (
        refused(handler.restore, path, args=restore(wider)),
        values(padded),
        str(laid["a"].format) == str(same["a"].format),
        told["a"].sharding == jnp.zeros(1).sharding,
    )


@CASES.shows(
    "tree.to_shape_dtype_struct.support_format", "SaveArgs.aggregate", "ArrayRestoreArgs.restore_type"
)
def leaves_described(ocp: Any, root: Path) -> Any:
    array = jnp.arange(6.0)
    struct = ocp.tree.to_shape_dtype_struct(array, support_format=True)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(root / "one", {"a": array}, save_args={"a": ocp.SaveArgs(aggregate=True)})
        args = ocp.ArrayRestoreArgs(restore_type=np.ndarray)
        back = checkpointer.restore(root / "one", restore_args={"a": args})
    return str(struct.format), ocp.SaveArgs(aggregate=True).aggregate, values(back)


@CASES.shows(
    "args.PyTreeRestore.transforms_default_to_original", "PyTreeCheckpointHandler.restore.legacy_transform_fn"
)
def where_leaves_without_a_rule_come_from(ocp: Any, root: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(root / "one", {"a": np.ones(2), "b": np.zeros(2)})
    handler = ocp.PyTreeCheckpointHandler()
    path, item = epath.Path(root / "one"), {"a": np.full(2, 7.0), "c": np.full(2, 8.0)}
    args = jax.tree.map(lambda _: ocp.RestoreArgs(), item)
    rules = {"c": ocp.Transform(original_key="b")}
    found = [
        handler.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item, restore_args=args, transforms=rules, transforms_default_to_original=to_original
            ),
        )
        for to_original in (True, False)
    ]
    swapped = handler.restore(
        path,
        item,
        args,
        legacy_transform_fn=lambda item, tree, infos: (
            {"a": tree["b"], "c": tree["a"]},
            {"a": infos["b"], "c": infos["a"]},
        ),
    )
    return [values(one) for one in [*found, swapped]]


@CASES.shows(
    "args.JaxRandomKeySave.save_args",
    "args.JaxRandomKeyRestore.restore_args",
    "args.ArrayRestore.item",
    "args.ArrayRestore.restore_args",
)
def keys_and_arrays_with_arguments(ocp: Any, root: Path) -> Any:
    with ocp.Checkpointer(ocp.JaxRandomKeyCheckpointHandler()) as checkpointer:
        checkpointer.save(
            root / "key", args=ocp.args.JaxRandomKeySave(jax.random.PRNGKey(3), save_args=ocp.SaveArgs())
        )
        place = ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[1]))
        key = checkpointer.restore(root / "key", args=ocp.args.JaxRandomKeyRestore(restore_args=place))
    with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as checkpointer:
        checkpointer.save(root / "array", args=ocp.args.ArraySave(jnp.arange(3)))
        array = checkpointer.restore(
            root / "array", args=ocp.args.ArrayRestore(item=np.zeros(3), restore_args=place)
        )
    return (
        values(key),
        key.devices() == {jax.devices()[1]},
        values(array),
        array.devices() == {jax.devices()[1]},
    )


@CASES.shows("DefaultCheckpointHandlerRegistry.other_registry", "CompositeCheckpointHandler.handler_registry")
def registries_of_handlers(ocp: Any, root: Path) -> Any:
    first = ocp.DefaultCheckpointHandlerRegistry()
    first.add("config", ocp.args.JsonSave, ocp.JsonCheckpointHandler("first"))
    second = ocp.DefaultCheckpointHandlerRegistry(first)
    composite = ocp.CompositeCheckpointHandler(handler_registry=second)
    with ocp.Checkpointer(composite) as checkpointer:
        checkpointer.save(root / "one", args=ocp.args.Composite(config=ocp.args.JsonSave({"a": 1})))
    return (root / "one" / "config" / "first").exists(), len(second.get_all_entries())


@CASES.shows(
    "BasePyTreeCheckpointHandler.save_concurrent_bytes",
    "BasePyTreeCheckpointHandler.restore_concurrent_bytes",
)
def limits_in_bytes(ocp: Any, root: Path) -> Any:
    seen: list[Any] = []
    inner = ocp.BasePyTreeCheckpointHandler(
        save_concurrent_bytes=3000,
        restore_concurrent_bytes=2000,
        type_handler_registry=looking_at(ocp, seen, most_bytes),
    )
    return bounds(ocp, root, ocp.PyTreeCheckpointHandler(handler_impl=inner), seen, 3000, 2000)


def test_the_older_names_of_limits_and_hosts_count(tmp_path: Path) -> None:
    seen: list[Any] = []
    registry = looking_at(ours, seen, most_bytes)
    handler = ours.PyTreeCheckpointHandler(
        concurrent_gb=1, primary_host=0, enable_pinned_host_transfer=False, type_handler_registry=registry
    )

    assert bounds(ours, tmp_path, handler, seen, GIB, GIB) == [("save", True), ("restore", True)]
    assert ours.BasePyTreeCheckpointHandler(save_device_host_concurrent_bytes=7)
    for made in (ours.PyTreeCheckpointHandler(primary_host=3), ours.PyTreeCheckpointer(primary_host=3)):
        checkpointer = made if isinstance(made, ours.Checkpointer) else ours.Checkpointer(made)
        with checkpointer, pytest.raises(ValueError, match="primary_host"):
            checkpointer.save(tmp_path / "two", {"x": np.ones(2)})


def test_leaves_are_asked_about_for_the_order_of_copies(tmp_path: Path) -> None:
    asked: set[str] = set()

    def first(path: Any) -> bool:
        asked.add(jax.tree_util.keystr(path))
        return True

    handler = ours.PyTreeCheckpointHandler(is_prioritized_key_fn=first)
    with ours.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "one", a_tree())

        assert asked == {"['a']", "['b']['c']", "['b']['n']"}
        assert values(checkpointer.restore(tmp_path / "one")) == values(a_tree())


def test_a_tree_with_values_in_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    with ours.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", {"x": np.ones(2)})
    named = ours.PyTreeCheckpointHandler(aggregate_filename="structure")
    assert values(named.restore(epath.Path(tmp_path / "one")))["x"][2] == [1, 1]

    (tmp_path / "one" / "structure").write_bytes(ours.msgpack_utils.msgpack_serialize({"x": 1}))
    for call in (named.restore, named.metadata):
        with pytest.raises(ValueError, match="rename that file to 'checkpoint'"):
            call(epath.Path(tmp_path / "one"))


def test_separate_values_of_a_database_are_refused(tmp_path: Path) -> None:
    async def merge() -> None:
        await ours.type_handlers.merge_ocdbt_per_process_files(
            epath.Path(tmp_path),
            ours.type_handlers.get_ts_context(),
            True,
            store_ocdbt_metadata_and_values_separately=True,
        )

    with pytest.raises((ValueError, NotImplementedError), match="same data files"):
        anyio.run(merge)


@pytest.mark.parametrize("shown", CASES, ids=lambda shown: shown.case.__name__)
def test_options_do_what_they_do_in_orbax(tmp_path: Path, shown: Shown) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()

    assert shown.case(ours, tmp_path / "ours") == shown.case(theirs, tmp_path / "theirs")
