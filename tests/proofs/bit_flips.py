"""Flips bits in every file of every kind of checkpoint, and counts what a restore makes of them.

    python tests/proofs/bit_flips.py [--per-file 32] [--page docs/reference/bit-flips.md]

Each flip is one bit. A restore of what it leaves either raises an error of penstock's, or gives the very same
result, or another one without a word: that must never happen where penstock wrote the checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from tests.unsealed import unseal

import penstock
import penstock.orbax as face
import penstock.orbax.v1 as face_v1
from penstock import SaveFormat
from penstock.errors import PenstockError
from penstock.items import Array, Composite, Json, NumpyRandomKey, PyTree, RandomKey

START, END = "<!-- begin -->\n", "<!-- end -->\n"


def tree() -> dict[str, Any]:
    """Leaves of every kind, small enough for thousands of restores."""
    return {
        "weights": np.arange(700, dtype=np.float32).reshape(7, 100),
        "bf16": jnp.arange(300, dtype=jnp.bfloat16),
        "key": jax.random.key(7),
        "step": 12,
        "name": "a text",
        "nothing": None,
        "list": [np.arange(5000, dtype=np.int32), ()],
    }


def saving(**form: Any) -> Callable[[Path], None]:
    """Return a function that saves the tree in a format."""

    def save(path: Path) -> None:
        with penstock.sync.Checkpointer(save_format=SaveFormat(**form)) as checkpointer:
            checkpointer.save(path, tree(), custom_metadata={"lr": 0.5, "tags": ["x"]}).result()

    return save


def save_items(path: Path) -> None:
    items = Composite(
        state=PyTree(tree(), {"epoch": 3}),
        config=Json({"layers": 12, "name": "x"}),
        bare=Array(np.arange(40.0)),
        rng=RandomKey(jax.random.key(1)),
        numpy=NumpyRandomKey(np.random.RandomState(0).get_state()),
    )
    penstock.sync.save(path, items, custom_metadata={"run": 5})


def save_steps(path: Path) -> None:
    with penstock.sync.CheckpointManager(path, metadata={"project": "p"}) as manager:
        save = manager.save(3, tree(), metrics={"loss": 0.25}, custom_metadata={"run": 5})
        assert save is not None
        save.result()


def save_safetensors(path: Path) -> None:
    plain = {name: value for name, value in tree().items() if name in {"weights", "bf16", "list", "name"}}
    penstock.sync.export_safetensors(plain, path.with_suffix(".safetensors"), custom_metadata={"lr": 0.5})


def save_shards(path: Path) -> None:
    tensors = {f"l{at}": np.arange(100 * at, 100 * at + 100, dtype=np.float32) for at in range(6)}
    penstock.sync.export_safetensors(tensors, path, max_shard_bytes=900, custom_metadata={"lr": 0.5})


def save_composite(path: Path) -> None:
    args = face.args.Composite(
        state=face.args.PyTreeSave({"a": np.arange(300.0), "text": "words"}),
        config=face.args.JsonSave({"layers": 12}),
        key=face.args.JaxRandomKeySave(jax.random.key(3)),
    )
    with face.Checkpointer(face.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args, custom_metadata={"run": 5})


def save_v1(path: Path) -> None:
    face_v1.save(path, {"a": np.arange(300.0), "text": "words"}, custom_metadata={"run": 5})


def save_as_before(path: Path) -> None:
    saving()(path)
    unseal(path)


def save_with_orbax(path: Path) -> None:
    values = {name: value for name, value in tree().items() if name != "key"}
    ocp.PyTreeCheckpointer().save(path, values)


def save_with_orbax_and_seal(path: Path) -> None:
    save_with_orbax(path)
    penstock.sync.seal(path)


def whole(path: Path) -> object:
    """Return all that penstock says of a checkpoint."""
    about = penstock.sync.metadata(path)
    said = (about.custom_metadata, about.tree_custom_metadata, about.root_custom_metadata)
    return comparable((penstock.sync.restore(path), said))


def items(path: Path) -> object:
    """Return all items, and what is said of them."""
    about = [penstock.sync.metadata(path, item=name) for name in ("state", "config")]
    said = [(one.custom_metadata, one.tree_custom_metadata) for one in about]
    return comparable((penstock.sync.restore_items(path), said))


def steps(path: Path) -> object:
    """Return all that a manager says of its only step."""
    with penstock.sync.CheckpointManager(path, read_only=True) as manager:
        step = manager.latest_step()
        about = manager.metadata(3)
        root = penstock.sync.metadata(path).root_custom_metadata
        return comparable((step, manager.restore(3), about.metrics, about.custom_metadata, root))


def safetensors(path: Path) -> object:
    """Return all that a safetensors file holds."""
    return whole(path.with_suffix(".safetensors"))


def composite(path: Path) -> object:
    """Return all items, as the face gives them, and what is said of them."""
    args = face.args.Composite(
        state=face.args.PyTreeRestore(),
        config=face.args.JsonRestore(),
        key=face.args.JaxRandomKeyRestore(),
    )
    with face.Checkpointer(face.CompositeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(path, args)
        about = checkpointer.metadata(path)
        return comparable(({name: found[name] for name in found}, about.custom_metadata))


def v1(path: Path) -> object:
    """Return what the newer API of the face gives."""
    return comparable((face_v1.load(path), face_v1.metadata(path).custom_metadata))


def comparable(value: object) -> object:
    """Return nested tuples that are equal only for results that are the same to the bit."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("key", str(value.dtype), comparable(jax.random.key_data(value)))
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        return (type(value).__name__, array.dtype.name, array.shape, array.tobytes())
    if isinstance(value, Mapping):
        return ("dict", tuple([(key, comparable(part)) for key, part in value.items()]))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(map(comparable, value)))

    return (type(value).__name__, repr(value))


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint."""

    name: str
    save: Callable[[Path], None]
    read: Callable[[Path], object] = whole
    is_safe: bool = True  #: whether penstock promises that no flip goes unnoticed


KINDS = (
    Kind("OCDBT", saving()),
    Kind("OCDBT, zstd", saving(codec="zstd", chunk_byte_size=4096)),
    Kind("OCDBT, zarr v3", saving(zarr=3)),
    Kind("a directory for each array", saving(ocdbt=False)),
    Kind("a directory for each array, zarr v3, zstd", saving(ocdbt=False, zarr=3, codec="zstd")),
    Kind("items", save_items, items),
    Kind("a manager's step", save_steps, steps),
    Kind("by Orbax, then `penstock seal`", save_with_orbax_and_seal),
    Kind("by `penstock.orbax`, items", save_composite, composite),
    Kind("by `penstock.orbax.v1`", save_v1, v1),
    Kind("safetensors", save_safetensors, safetensors),
    Kind("safetensors, several files", save_shards),
    Kind("OCDBT, by penstock 0.1", save_as_before, is_safe=False),
    Kind("OCDBT, by Orbax", save_with_orbax, is_safe=False),
)


@dataclass
class Count:
    """What became of the flips in one kind of checkpoint."""

    flips: int = 0
    found: int = 0  #: by a restore
    harmless: int = 0  #: the result is the same
    silent: int = 0  #: the result is another one
    verified: int = 0  #: found by `verify`
    unverified: dict[str, int] = dataclasses.field(default_factory=dict[str, int])  #: not found, by file


def flips(path: Path, per_file: int, choice: random.Random) -> Iterator[tuple[Path, int, int]]:
    """Yield a file, a byte and a bit in each of `per_file` regions of every file."""
    below = path if path.is_dir() else path.parent
    for file in sorted(below.rglob("*")):
        nbytes = file.stat().st_size if file.is_file() else 0
        regions = min(per_file, nbytes)
        for at in range(regions):
            start, stop = nbytes * at // regions, nbytes * (at + 1) // regions
            yield file, choice.randrange(start, stop), 1 << choice.randrange(8)


def count_flips(kind: Kind, per_file: int, seed: int, *, verify: bool = True) -> Count:
    """Try flips in one kind of checkpoint."""
    found, choice = Count(), random.Random(f"{kind.name} {seed}")  # no secret
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ckpt"
        kind.save(path)
        expected = kind.read(path)
        there = path if path.exists() else path.with_suffix(".safetensors")
        for file, at, bit in flips(there, per_file, choice):
            data = bytearray(file.read_bytes())
            data[at] ^= bit
            file.write_bytes(data)
            _look(kind, path, there, expected, file, found, verify=verify)
            data[at] ^= bit
            file.write_bytes(data)

    return found


def _look(
    kind: Kind, path: Path, there: Path, expected: object, file: Path, found: Count, *, verify: bool
) -> None:
    found.flips += 1
    name = str(file.relative_to(there)) if there.is_dir() else file.name
    try:
        result = kind.read(path)
    except PenstockError:
        found.found += 1
    else:
        found.harmless += result == expected
        found.silent += result != expected
        if result != expected and kind.is_safe:
            sys.stdout.write(f"SILENT: {kind.name}: {name}\n")

    if verify and penstock.sync.verify(there).damages:
        found.verified += 1
    elif verify:
        found.unverified[name] = found.unverified.get(name, 0) + 1


def table(counts: Mapping[str, Count]) -> str:
    """Show the counts as a table in Markdown."""
    rows = [
        "| checkpoint | flips | found by a restore | harmless | other values, silently | found by `verify` |"
    ]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for name, one in counts.items():
        numbers = (one.flips, one.found, one.harmless, one.silent, one.verified)
        rows.append(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |")

    return "\n".join(rows) + "\n"


def main() -> int:
    """Count, print the table, and return 1 if a flip went unnoticed where none may."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-file", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    counts: dict[str, Count] = {}
    for kind in KINDS:
        one = counts[kind.name] = count_flips(kind, options.per_file, options.seed)
        sys.stdout.write(f"{kind.name}: {one}\n")
        sys.stdout.flush()

    sys.stdout.write(table(counts))
    if options.page is not None:
        before, _, rest = options.page.read_text().partition(START)
        _, _, after = rest.partition(END)
        options.page.write_text(f"{before}{START}{table(counts)}{END}{after}")

    return int(any(counts[kind.name].silent for kind in KINDS if kind.is_safe))


if __name__ == "__main__":
    sys.exit(main())
