"""Every file and folder of every kind of checkpoint is damaged: a penstock error follows, or no harm."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.corpus.corpora import unpacked_orbax

import penstock
from penstock import SaveFormat
from penstock.errors import PenstockError
from penstock.handlers import Composite
from penstock.items import Array, Json, NumpyRandomKey, PyTree, RandomKey


class Kind(NamedTuple):
    """A kind of checkpoint: how to make one, and what to restore from it."""

    make: Callable[[Path, Path], object]  #: called with the corpus and the destination
    path: str = ""  #: relative path of what is restored
    item: str | None = None

    @property
    def damaged(self) -> str:
        """The folder to damage; other items are left alone."""
        return "/".join(filter(None, (self.path, self.item)))


def tree() -> Any:
    return {
        "a": np.arange(6000, dtype=np.float32).reshape(60, 100),
        "b": [jnp.arange(3), 5, "text", None],
        "key": jax.random.key(1),
        "small": np.arange(4),
    }


def ours(**form: Any) -> Kind:
    def make(_: Path, path: Path) -> None:
        with penstock.sync.Checkpointer(save_format=SaveFormat(**form)) as checkpointer:
            checkpointer.save(path, tree(), custom_metadata={"x": 1}).result()

    return Kind(make)


def composite(item: str) -> Kind:
    items = Composite(
        array=Array(np.arange(3)),
        json=Json({"a": [1, "x"]}),
        key=RandomKey(jax.random.key(3)),
        numpy=NumpyRandomKey(np.random.RandomState(2).get_state()),
        tree=PyTree(tree()),
    )

    def make(_: Path, path: Path) -> None:
        penstock.sync.save(path, items)

    return Kind(make, item=item)


def theirs(case: str, path: str = "", item: str | None = None) -> Kind:
    def make(corpus: Path, to: Path) -> None:
        shutil.copytree(corpus / "corpus" / case / "ckpt", to)

    return Kind(make, path, item)


def of_two_processes(corpus: Path, path: Path) -> None:
    shutil.copytree(corpus / "corpus_mp" / "pytree_ocdbt_zarr3", path)


def shards(_: Path, path: Path) -> None:
    path.mkdir()
    files = {f"x{at}": f"model-{at:05}-of-00002.safetensors" for at in (1, 2)}
    for name, file in files.items():
        save_file({name: np.arange(5, dtype=np.float32)}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def exported(_: Path, path: Path) -> None:
    path.mkdir()
    penstock.sync.export_safetensors(tree(), path / "model.safetensors")


KINDS: Final = {
    "ours": ours(),
    "ours, coded chunks": ours(zarr=3, codec="zstd", chunk_byte_size=9000),
    "ours, directories": ours(ocdbt=False),
    "ours, coded directories": ours(ocdbt=False, zarr=3, codec="zstd", chunk_byte_size=9000),
    **{f"ours, {item}": composite(item) for item in ("array", "json", "key", "numpy", "tree")},
    "safetensors, shards": Kind(shards),
    "safetensors, exported": Kind(exported),
    "two processes": Kind(of_two_processes),
    "0.2.7": theirs("old_0_2_7_fs"),
    "0.4.4": theirs("old_0_4_4_ocdbt"),
    "0.4.4, some packed": theirs("old_0_4_4_agg"),
    "0.4.4, all packed": theirs("old_0_4_4_all_agg"),
    "0.6.4, steps": theirs("old_0_6_4_manager"),
    "0.11.5, steps": theirs("old_0_11_5_manager"),
    "msgpack": theirs("legacy_handmade_msgpack"),
    "array": theirs("v0_flat_array"),
    "json": theirs("v0_flat_json"),
    "directories": theirs("v0_fs_zarr2"),
    "mixed": theirs("v0_pytree_mixed"),
    "keys": theirs("v0_prng_keys"),
    "items": theirs("v0_manager_items"),
    "items, key": theirs("v0_manager_items", "ckpt_00003", "key"),
    "items, numpy key": theirs("v0_manager_items", "ckpt_00003", "npkey"),
    "items, proto": theirs("v0_manager_items", "ckpt_00003", "proto"),
    "items, json": theirs("v0_manager_items", "ckpt_00003/cfg"),
    "steps": theirs("v0_manager_default"),
    "v1": theirs("v1_free"),
    "v1, steps": theirs("v1_training"),
}

# Kinds that share their code with a faster kind.
SLOW_KINDS: Final = (
    "ours, coded directories",
    *("0.6.4, steps", "0.11.5, steps", "steps", "v1, steps"),
    *("items", "items, key", "items, numpy key"),
)
kinds = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_KINDS)) for name in KINDS]
)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_by_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


def of_another_type(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)

    return write


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"{}")


Damages: TypeAlias = dict[str, Callable[[Path], None]]

TO_FILES: Final[Damages] = {
    "cut in half": cut_in_half,
    "cut by a byte": cut_by_a_byte,
    "empty": empty,
    "garbled": garble,
    "removed": remove,
    "made a directory": make_directory,
}
TO_DOCUMENTS: Final[Damages] = {
    f"made {text}": of_another_type(text) for text in ("[]", "{}", "null", "3", '"x"', "[{}]", "{")
}
TO_FOLDERS: Final[Damages] = {"removed": remove, "made a file": make_file}

# Damage that looks like a sound checkpoint with other values.
OTHER_VALUES: Final = (
    ("json|items, json|ours, json", r"(.*/)?metadata", "made .*"),
    ("items, proto", r".*/proto.pbtxt", "made .*|cut .*|empty"),
    ("steps|v1, steps|0.6.4, steps|0.11.5, steps", r"\d+", ".*"),  # the step before it becomes the latest
    ("0.2.7|msgpack", "checkpoint", "made [3{]"),  # sound msgpack: one number
    ("0.2.7", r"(.*/)?checkpoint|.*/[\d.]+", "removed"),  # structure from names; missing chunks are zeros
    ("0.4.4", "_METADATA", "removed"),  # structure from the msgpack file, without types
    (".*", r"(.*/)?array_metadatas(/process_0)?", "removed"),  # random keys become raw arrays
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked_orbax(tmp_path_factory)


@pytest.fixture(scope="module")
def checkpointer() -> Iterator[Any]:
    with penstock.sync.Checkpointer() as checkpointer:
        yield checkpointer


def bits(value: Any) -> Any:
    """Return what must not change: structure, types, dtypes, shapes and bytes."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()

        return repr(leaf)

    leaves, treedef = jax.tree.flatten(value)
    return [of(leaf) for leaf in leaves], treedef


def some_of_each(root: Path) -> Iterator[Path]:
    """Yield files and folders, but only two of those whose names differ only in numbers."""
    seen: Counter[str] = Counter()
    for path in sorted(root.rglob("*")):
        pattern = re.sub(r"[0-9a-f]{32}|[0-9]+", "N", str(path.relative_to(root)))
        seen[pattern] += 1
        if seen[pattern] <= 2:
            yield path


def is_document(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return path.name == "checkpoint"
    return True


def assert_told(error: PenstockError, path: Path) -> None:
    """Assert that an error names the file, its folder, or the leaf."""
    text = str(error)
    assert str(path) in text or f"{path.parent}: " in text or error.key_path is not None, text


@contextmanager
def mended(path: Path, aside: Path) -> Generator[None]:
    """Restore the file or folder at `path` when the block ends, whatever has happened to it."""
    shutil.copytree(path, aside) if path.is_dir() else shutil.copyfile(path, aside)
    yield
    if path.exists():
        remove(path)
    aside.rename(path)


@pytest.mark.thinned(2)
@kinds
def test_damage_is_told_or_does_no_harm(name: str, corpus: Path, tmp_path: Path, checkpointer: Any) -> None:
    kind, root = KINDS[name], tmp_path / "ckpt"
    kind.make(corpus, root)
    asked = {"path": root / kind.path, "item": kind.item}
    whole, described = bits(checkpointer.restore(**asked)), checkpointer.metadata(**asked).tree
    structure: Any = jax.tree.structure
    told = 0
    for path in some_of_each(root / kind.damaged):
        damages = TO_FOLDERS if path.is_dir() else TO_FILES | (TO_DOCUMENTS if is_document(path) else {})
        for damage, inflict in damages.items():
            what = (name, str(path.relative_to(root)), damage)
            other = any(all(map(re.fullmatch, patterns, what)) for patterns in OTHER_VALUES)
            with mended(path, tmp_path / "aside"):
                inflict(path)
                try:
                    metadata = checkpointer.metadata(**asked).tree
                    restored = bits(checkpointer.restore(**asked))
                except PenstockError as error:
                    assert_told(error, path)
                    told += 1
                else:
                    assert other or restored == whole, what
                    assert other or structure(metadata) == structure(described), what

    assert told > 2


def wrong_versions(document: Any, turn: Iterator[int]) -> Iterator[Any]:
    """Yield versions of a document with one part, at any depth, of a wrong type or missing."""
    for _ in range(2):
        wrong = WRONG[next(turn) % len(WRONG)]
        if type(wrong) is not type(document):
            yield wrong

    if isinstance(document, dict):
        for key, value in list(document.items())[:4]:
            yield from ({**document, key: wrong} for wrong in wrong_versions(value, turn))
            yield {name: kept for name, kept in document.items() if name != key}
    elif isinstance(document, list):
        for at, value in enumerate(document[:2]):
            yield from ([*document[:at], wrong, *document[at + 1 :]] for wrong in wrong_versions(value, turn))


WRONG: Final[tuple[Any, ...]] = (None, [], -1, "x", {}, 2**62, True, ["x"], 1.5, {"x": {}}, "")


@pytest.mark.thinned(4)
@kinds
def test_documents_with_parts_of_another_type(
    name: str, corpus: Path, tmp_path: Path, checkpointer: Any
) -> None:
    kind, root = KINDS[name], tmp_path / "ckpt"
    kind.make(corpus, root)
    asked = {"path": root / kind.path, "item": kind.item}
    turn = count()
    for path in some_of_each(root / kind.damaged):
        if path.is_dir() or path.name == "checkpoint" or not is_document(path):
            continue
        with mended(path, tmp_path / "aside"):
            for wrong in wrong_versions(json.loads(path.read_bytes()), turn):
                path.write_text(json.dumps(wrong))
                try:
                    checkpointer.metadata(**asked)
                    checkpointer.restore(**asked)
                except PenstockError as error:
                    assert_told(error, path)
