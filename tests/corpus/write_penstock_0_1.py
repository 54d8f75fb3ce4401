"""Wrote `penstock_0_1.tar.xz`, with penstock 0.1 before its rooms were rebuilt.

It is kept to say what is in the archive. The archive stays as it is: only that code wrote such files.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from google.protobuf.struct_pb2 import Value
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.corpus.described_trees import Vocabulary, VocabularyHandler, describe

import penstock
import penstock.orbax
import penstock.orbax.v1
from penstock import Composite, SaveArgs, SaveFormat
from penstock.items import Array, Json, NumpyRandomKey, Proto, PyTree, RandomKey
from penstock.steps import KeepLast

Tree = dict[str, Any]
DTYPES = (
    "bfloat16", "bool", "complex64", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int16",
    "int32", "int4", "int8", "uint16", "uint32", "uint8",
)  # fmt: skip


def pattern(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Values that differ from their neighbours in every dtype."""
    return (np.arange(np.prod(shape, dtype=int)) % 7).reshape(shape).astype(dtype)


def leaves_of_every_kind() -> Tree:
    """Return a tree with a leaf of each kind that penstock stores by itself."""
    nan = np.array([0x7FC12345, 0xFF800000, 0x80000000], np.uint32).view(np.float32)
    return {
        "jax": {name: jnp.asarray(pattern((3, 5), name)) for name in DTYPES},
        "numpy": {name: pattern((2, 3), name) for name in (*DTYPES, "int64", "float64", "complex128")},
        "numpy scalars": {"f": np.float64(0.1), "i": np.int8(-3), "b": np.bool_(True)},
        "numbers": {"int": -(2**40), "float": 0.1, "bool": True, "complex": 1 - 2j},
        "strings": {"plain": "text", "empty": "", "other": "ä\n😀"},
        "empty": {"none": None, "dict": {}, "list": [], "tuple": ()},
        "shapes": {"scalar": jnp.float32(2.5), "none": jnp.zeros((0, 4)), "long": pattern((1, 1, 9, 1))},
        "bits": {"jax": jnp.asarray(nan), "numpy": nan},
        "keys": {
            "threefry": jax.random.key(7),
            "many": jax.random.split(jax.random.key(8), 3),
            "rbg": jax.random.key(9, impl="rbg"),
            "raw": jax.random.key_data(jax.random.key(10)),
        },
        "names": {"a/b": pattern((2,)), "a.b": pattern((3,)), "ä ö": pattern((4,))},
        "sequence": [pattern((2,)), (jnp.ones(3), [1, "two"])],
    }


def plain_leaves() -> Tree:
    """Return a tree that every layout and format can hold."""
    return {
        "params": {"kernel": jnp.asarray(pattern((64, 48))), "bias": pattern((48,), np.float16)},
        "layers": [{"w": jnp.asarray(pattern((8, 8), "bfloat16"))}, {"w": pattern((8, 8), np.int32)}],
        "step": 100,
        "name": "run",
    }


def sharded_leaves() -> Tree:
    """Return arrays that lie on eight devices in different ways."""
    devices = np.array(jax.devices())
    pair, cube = Mesh(devices.reshape(4, 2), ("x", "y")), Mesh(devices.reshape(2, 2, 2), ("a", "b", "c"))

    def put(shape: tuple[int, ...], mesh: Mesh, *spec: Any) -> jax.Array:
        return jax.device_put(pattern(shape), NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "both axes": put((16, 8), pair, "x", "y"),
        "first": put((8, 6), pair, "x"),
        "second": put((3, 4), pair, None, "y"),
        "replicated": put((5,), pair),
        "joined": put((16, 2), pair, ("x", "y")),
        "cube": put((4, 2, 6), cube, "a", None, "c"),
        "one device": jax.device_put(pattern((3,)), jax.devices()[5]),
        "reversed": put((8,), Mesh(devices[::-1].copy(), ("x",)), "x"),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(1), 8), NamedSharding(pair, PartitionSpec("x"))
        ),
    }


def optimizer_state() -> Tree:
    """Return the state of a training run, with named tuples."""
    params = {"w": jnp.asarray(pattern((4, 4))), "b": jnp.zeros(4)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "pair": (1, (2.5, None))}


def registry() -> penstock.HandlerRegistry:
    """Return the handlers that come with penstock, and that of `Vocabulary`."""
    handlers = penstock.Checkpointer().engine.registry
    handlers.register(Vocabulary, VocabularyHandler())
    return handlers


class Corpus:
    """Writes the cases below one folder, and notes what they hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases: dict[str, Any] = {}

    def note(self, name: str, tree: Any, path: str = "", **restore: Any) -> None:
        """Note what was saved, and what comes back without a target."""
        with penstock.sync.Checkpointer(registry=registry()) as checkpointer:
            place = self.folder / (path or name)
            found = checkpointer.restore(place, **restore)
            about = checkpointer.metadata(place, item=restore.get("item"))
            try:
                checked = checkpointer.verify(place, item=restore.get("item")).n_ranges
            except penstock.PenstockError:
                checked = None  # of safetensors and of items that are no trees, no checksums are kept

        self.cases[name] = {
            "path": path or name,
            "options": restore,
            "saved": describe(tree),
            "found": describe(found),
            "n_ranges": checked,
            "custom_metadata": about.custom_metadata,
            "leaves": [[leaf.name, leaf.kind, leaf.dtype, leaf.shape] for leaf in about.leaves],
        }

    def save(self, name: str, tree: Any, /, *, piece_bytes: str = "16MiB", **options: Any) -> None:
        """Save a tree with `SaveFormat` options, or others of `Checkpointer.save`."""
        os.environ["PENSTOCK_SAVE__PIECE_BYTES"] = piece_bytes
        given = {key: options.pop(key) for key in list(options) if key in SaveFormat.__dataclass_fields__}
        place = self.folder / name
        form = SaveFormat(**given)
        with penstock.sync.Checkpointer(save_format=form, registry=registry()) as checkpointer:
            checkpointer.save(place, tree, **options).result()


def formats(corpus: Corpus) -> None:
    """Every layout with every codec, and each option of the format."""
    trees: dict[str, Callable[[], Tree]] = {"every": leaves_of_every_kind, "plain": plain_leaves}
    for ocdbt in (True, False):
        for zarr in (2, 3):
            for codec in ("none", "zstd", "zstd:19", "auto"):
                kind = "every" if codec in ("none", "zstd") else "plain"
                tree = trees[kind]()
                if not ocdbt:
                    tree.pop("names", None)  # a/b and a.b are one file each, and so refused or nested
                name = f"{'ocdbt' if ocdbt else 'files'}-zarr{zarr}-{codec.replace(':', '-')}"
                corpus.save(name, tree, ocdbt=ocdbt, zarr=zarr, codec=codec)
                corpus.note(name, tree)

    big = {"w": jnp.asarray(pattern((256, 64))), "v": pattern((4096,), np.int8), "n": 1}
    options: dict[str, Tree] = {
        "chunks": {"chunk_byte_size": 4096},
        "chunks-zarr3-zstd": {"chunk_byte_size": 4096, "zarr": 3, "codec": "zstd"},
        "data-files": {"ocdbt_target_data_file_size": 8192, "chunk_byte_size": 4096},
        "pieces": {"piece_bytes": "4KiB"},
        "pieces-files": {"ocdbt": False, "piece_bytes": "4KiB"},
        "metadata": {"custom_metadata": {"run": "a", "n": [1, None]}},
        "save-args": {"save_args": {"w": SaveArgs(shard_axes=(0,), chunk_byte_size=8192)}},
    }
    for name, given in options.items():
        corpus.save(name, big, **given)
        corpus.note(name, big)

    many = {f"layer_{at:03d}": {"w": pattern((at % 5,)), "b": jnp.float32(at)} for at in range(60)}
    corpus.save("many-leaves", many)
    corpus.note("many-leaves", many)
    corpus.save("cast", {"w": pattern((4, 4))}, save_args={"w": SaveArgs(dtype=jnp.bfloat16)})
    corpus.note("cast", {"w": pattern((4, 4), "bfloat16")})
    state = optimizer_state()
    for rich in (False, True):
        name = "rich-types" if rich else "plain-types"
        corpus.save(name, state, rich_types=rich)
        corpus.note(name, state)


def sharded(corpus: Corpus) -> None:
    """Arrays on eight devices, in each layout."""
    tree = sharded_leaves()
    for name, options in {
        "sharded": {},
        "sharded-zarr3-zstd": {"zarr": 3, "codec": "zstd"},
        "sharded-files": {"ocdbt": False},
        "sharded-replica-parallel": {"replica_parallel": True, "replica_parallel_min_bytes": 1},
        "sharded-chunks": {"chunk_byte_size": 16},
    }.items():
        corpus.save(name, tree, **options)
        corpus.note(name, tree)


def linked(corpus: Corpus) -> None:
    """A chain of checkpoints that share data files, by object and by digest."""
    frozen = jnp.asarray(pattern((128, 32)))
    trees = [{"frozen": frozen, "host": pattern((512,)), "step": at, "w": jnp.full(8, at)} for at in range(3)]
    for compare in ("identity", "digest"):
        with penstock.sync.Checkpointer() as checkpointer:
            for at, tree in enumerate(trees):
                base = {"base": corpus.folder / f"linked-{compare}" / str(at - 1)} if at else {}
                options = {"compare": compare} if compare == "digest" else {}
                path = corpus.folder / f"linked-{compare}" / str(at)
                report = checkpointer.save(path, tree, **base, **options).result()
                assert bool(report.nbytes_kept) == bool(at), report

        for at, tree in enumerate(trees):
            corpus.note(f"linked-{compare}-{at}", tree, f"linked-{compare}/{at}")


def items(corpus: Corpus) -> None:
    """Several items of every kind, and leaves of a type that penstock does not know."""
    tree, words = plain_leaves(), Vocabulary(["a", "b"])
    values = {
        "state": tree,
        "ema": {"w": pattern((3,)), "words": words},
        "config": {"layers": 12, "name": "small", "list": [1, None]},
        "scale": np.arange(3),
        "key": jax.random.key(3),
        "shuffle": np.random.RandomState(4).get_state(),
        "message": 'string_value: "x"\n',
    }
    composite = Composite(
        state=PyTree(tree, custom_metadata={"decay": 0.5}),
        ema=values["ema"],
        config=Json(values["config"]),
        scale=Array(values["scale"]),
        key=RandomKey(values["key"]),
        shuffle=NumpyRandomKey(values["shuffle"]),
        message=Proto(Value(string_value="x")),
    )
    corpus.save("items", composite, custom_metadata={"commit": "abc"})
    corpus.save("items-files", composite, ocdbt=False, zarr=3)
    for name in ("items", "items-files"):
        for item, value in values.items():
            tree = {"checkpoint": value} if item == "scale" else value  # as Orbax names an array alone
            corpus.note(f"{name}-{item}", tree, name, item=item)

    corpus.save("third-party", {"words": words, "w": pattern((4,)), "list": [Vocabulary([])]})
    corpus.note("third-party", {"words": words, "w": pattern((4,)), "list": [Vocabulary([])]})


def safetensors(corpus: Corpus) -> None:
    """One file, and a folder of several with an index."""
    tree = {**plain_leaves(), "key": jax.random.key(5), "none": None}
    penstock.sync.export_safetensors(tree, corpus.folder / "one.safetensors", custom_metadata={"a": "b"})
    corpus.note("safetensors", tree, "one.safetensors", split=".")
    penstock.sync.export_safetensors(tree, corpus.folder / "shards", max_shard_bytes=4096)
    corpus.note("safetensors-shards", tree, "shards", split=".")


def steps(corpus: Corpus) -> None:
    """Directories of steps with metrics, as each of the managers keeps them."""
    trees = {step: {"w": jnp.full((4, 4), step, jnp.float32), "step": step} for step in (1, 2, 5)}
    root = corpus.folder / "manager"
    with penstock.sync.CheckpointManager(root, keep=KeepLast(3), metadata={"run": 7}) as manager:
        for step, tree in trees.items():
            manager.save(step, tree, metrics={"loss": 1 / step}, custom_metadata={"at": step})

    named = corpus.folder / "manager-items"
    names = penstock.steps.StepNames("ckpt", 5)
    with penstock.sync.CheckpointManager(named, names=names) as manager:
        for step, tree in trees.items():
            manager.save(step, Composite(params=tree, config=Json({"lr": step})), metrics={"loss": step})

    ocp = penstock.orbax
    options = ocp.CheckpointManagerOptions(max_to_keep=3, best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(corpus.folder / "v0-manager", options=options, metadata={"run": 8}) as v0:
        for step, tree in trees.items():
            v0.save(step, args=ocp.args.StandardSave(tree), metrics={"loss": 1 / step})

        v0.wait_until_finished()

    with ocp.CheckpointManager(corpus.folder / "v0-items") as v0:
        for step, tree in trees.items():
            args = ocp.args.Composite(
                params=ocp.args.PyTreeSave(tree),
                config=ocp.args.JsonSave({"lr": step}),
                scale=ocp.args.ArraySave(np.arange(step)),
                key=ocp.args.JaxRandomKeySave(jax.random.key(step)),
            )
            v0.save(step, args=args)

        v0.wait_until_finished()

    for step, tree in trees.items():
        corpus.note(f"manager-{step}", tree, f"manager/{step}")
        corpus.note(f"manager-items-{step}", tree, f"manager-items/ckpt_{step:05d}", item="params")
        corpus.note(f"manager-items-{step}-c", {"lr": step}, f"manager-items/ckpt_{step:05d}", item="config")
        corpus.note(f"v0-manager-{step}", tree, f"v0-manager/{step}")
        corpus.note(f"v0-items-{step}", tree, f"v0-items/{step}", item="params")
        corpus.note(f"v0-items-{step}-config", {"lr": step}, f"v0-items/{step}", item="config")
        scale = {"checkpoint": np.arange(step)}
        corpus.note(f"v0-items-{step}-scale", scale, f"v0-items/{step}", item="scale")
        corpus.note(f"v0-items-{step}-key", jax.random.key(step), f"v0-items/{step}", item="key")
    corpus.note("manager-latest", trees[5], "manager")
    corpus.note("v0-manager-latest", trees[5], "v0-manager")


class OrbaxVocabularyHandler(penstock.orbax.type_handlers.TypeHandler):
    """The handler of `Vocabulary` as it would be written for Orbax."""

    def typestr(self) -> str:
        return "corpus.Vocabulary"

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        for value, info in zip(values, infos, strict=True):
            (Path(info.parent_dir) / f"{info.name}.words.json").write_text(json.dumps(value.words))
        return []

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        files = [Path(info.parent_dir) / f"{info.name}.words.json" for info in infos]
        return [Vocabulary(json.loads(file.read_text())) for file in files]

    async def metadata(self, infos: Any) -> Any:
        return [None for _ in infos]


def orbax_face(corpus: Corpus) -> None:
    """What the faces of Orbax's two interfaces write."""
    tree, ocp, folder = plain_leaves(), penstock.orbax, corpus.folder
    ocp.PyTreeCheckpointer().save(folder / "v0-pytree", tree)
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(folder / "v0-pytree-files", tree)
    ocp.PyTreeCheckpointer(use_zarr3=True).save(folder / "v0-pytree-zarr3", tree)
    for name in ("v0-pytree", "v0-pytree-files", "v0-pytree-zarr3"):
        corpus.note(name, tree)

    numbers = {key: value for key, value in tree.items() if key != "name"}  # it takes no strings
    with ocp.StandardCheckpointer() as standard:
        standard.save(folder / "v0-standard", numbers)
        standard.wait_until_finished()
    corpus.note("v0-standard", numbers)

    ocp.type_handlers.register_type_handler(Vocabulary, OrbaxVocabularyHandler())
    words = {"words": Vocabulary(["x"]), "w": jnp.ones(3)}
    ocp.PyTreeCheckpointer().save(folder / "v0-third-party", words)
    corpus.note("v0-third-party", words)

    v1 = penstock.orbax.v1
    v1.save(folder / "v1-pytree", tree)
    v1.save_checkpointables(folder / "v1-items", {"model": tree, "config": {"lr": 0.5}})
    v1.partial.save(folder / "v1-partial", {"params": tree["params"]})
    v1.partial.save(folder / "v1-partial", {"layers": tree["layers"]})
    v1.partial.finalize(folder / "v1-partial")
    corpus.note("v1-pytree", tree)
    corpus.note("v1-items", tree, item="model")
    corpus.note("v1-items-config", {"lr": 0.5}, "v1-items", item="config")
    corpus.note("v1-partial", {"params": tree["params"], "layers": tree["layers"]})


def main(folder: Path) -> None:
    """Write every case below `folder`, and the archive beside it."""
    folder.mkdir(parents=True)
    corpus = Corpus(folder)
    for write in (formats, sharded, linked, items, safetensors, steps, orbax_face):
        write(corpus)

    (folder / "expected.json").write_text(json.dumps(corpus.cases))
    with tarfile.open(folder.parent / "penstock_0_1.tar.xz", "w:xz", preset=9) as archive:
        archive.add(folder, "penstock_0_1")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
