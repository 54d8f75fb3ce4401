"""Random trees with random rules, converted and compared with NumPy; some are killed and resumed.

`make convert-proof`. Each conversion reads one format and writes another, in small pieces; a restore with the
same rules must give the same, and where a bit of the source has changed both must refuse, or not need it.
Conversions of larger trees by the command are killed (SIGKILL) after a random time and gone on with, perhaps
more than once: what is made must be what NumPy makes, a file byte for byte the one of a conversion that was
not interrupted, and before that nothing may stand under its name.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from tests.forked_program import Process, fork
from tests.plain_rules import Leaves, apply_plainly, same_bits, trees_with_rules

import penstock
from penstock.cli import main as command
from penstock.errors import CorruptCheckpointError
from penstock.rules import Rule, Rules

SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

DAMAGED = 3
"""So many times a bit of each source is changed."""

NOT_IN_TENSORS = {"int4", "complex64", "float8_e8m0fnu"}
"""Which a file of safetensors cannot hold, or not for every reader."""


def nested(leaves: Leaves) -> dict[str, Any]:
    """The tree that dotted names stand for."""
    tree: dict[str, Any] = {}
    for name, array in leaves.items():
        *above, last = name.split(".")
        inner = tree
        for key in above:
            inner = inner.setdefault(key, {})

        inner[last] = array

    return tree


def named(tree: Any) -> Leaves:
    """The leaves of a tree by their dotted names."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in found}


def compare(found: Leaves, wanted: Leaves) -> None:
    """Raise unless both have the same leaves, bit for bit."""
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    for name, array in wanted.items():
        assert same_bits(found[name], array), name


def convert_one(
    folder: Path, leaves: Leaves, rules: Sequence[Rule], source: str, target: str, piece: int
) -> None:
    """Convert a tree with rules, restore it with the same, and compare both with NumPy; then damage it."""
    wanted = apply_plainly(rules, leaves)
    dtypes = {array.dtype.name for array in (*leaves.values(), *wanted.values())}
    if dtypes & NOT_IN_TENSORS or not wanted:
        source, target = ("plain" if each == "safetensors" else each for each in (source, target))

    path, made = folder / f"source.{source}", folder / f"made.{target}"
    # Thousands of pieces of a leaf take seconds, and show no more than a hundred.
    piece = max(piece, max([array.nbytes for array in (*leaves.values(), *wanted.values())]) // 100)
    config = penstock.Config.load(environ={}, arguments={"save": {"piece_bytes": piece}})
    forms = {"coded": penstock.SaveFormat(codec="zstd:1"), "zarr": penstock.SaveFormat(ocdbt=False, zarr=3)}
    if source == "safetensors":
        penstock.sync.export_safetensors(nested(leaves), path)
    else:
        with penstock.sync.Checkpointer(save_format=forms.get(source), config=config) as checkpointer:
            checkpointer.save(path, nested(leaves)).result()

    given = Rules(rules, rest="keep")
    form = None if target == "safetensors" else forms.get(target)
    penstock.sync.convert(path, made, rules=given, save_format=form, config=config)
    split = "." if target == "safetensors" else None
    compare(named(penstock.sync.restore(made, split=split)), wanted)

    if not wanted:  # a target without leaves is one empty dict, which is not stored
        return

    split = "." if source == "safetensors" else None
    like = nested({name: np.zeros(array.shape, array.dtype) for name, array in wanted.items()})
    compare(named(penstock.sync.restore(path, split=split, like=like, rules=given)), wanted)
    if source == "safetensors":  # it has no checksums
        return

    rng = random.Random(repr((rules, source, target, piece)))
    for number in range(DAMAGED):
        other = folder / f"other{number}.{target}"
        with damaged(path, rng):
            with suppress(CorruptCheckpointError):  # unless no rule keeps what is damaged
                penstock.sync.convert(path, other, rules=given, save_format=form, config=config)
                split = "." if target == "safetensors" else None
                compare(named(penstock.sync.restore(other, split=split)), wanted)
            with suppress(CorruptCheckpointError):
                compare(named(penstock.sync.restore(path, like=like, rules=given)), wanted)


@contextmanager
def damaged(checkpoint: Path, rng: random.Random) -> Generator[None]:
    """Change a bit of a data file, and change it back."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    file = rng.choice([path for path in files if not path.name.startswith(("_", "commit"))] or files)
    whole = file.read_bytes()
    content = bytearray(whole)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    yield
    file.write_bytes(whole)


def convert_many(folder: Path, trees: int, seed: int) -> Counter[str]:
    """Convert random trees with random rules; return how often each rule was carried out."""
    counts = Counter[str]()
    formats = st.sampled_from(["plain", "coded", "zarr", "safetensors"])

    @seeded(seed)
    @settings(max_examples=trees, deadline=None, database=None, suppress_health_check=SLOW_TO_DRAW)
    @given(trees_with_rules(), formats, formats, st.sampled_from([7, 64, 1000, 2**20]))
    def one(drawn: tuple[Leaves, list[Rule]], source: str, target: str, piece: int) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            convert_one(Path(place), *drawn, source, target, piece)

        counts.update(["trees", *[rule.operation for rule in drawn[1]]])

    one()
    return counts


def convert_by_command(given: Sequence[str]) -> int:
    """Run `penstock convert` silently, in a process of its own."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return command(["convert", *given])


def begin(*given: object) -> Process:
    """Begin a conversion in a fork of a process that has imported what this one has."""
    kept = {"anyio", "hypothesis", "jax", "penstock", "pytest", "tests"}
    imported = [name for name in sys.modules if name.partition(".")[0] in kept]
    return fork(convert_by_command, [str(each) for each in given], imported)


def kill_one(folder: Path, leaves: Leaves, rules: Sequence[Rule], rng: random.Random) -> Counter[str]:
    """Kill conversions of a tree and go on with them; return how many were killed, and how they ended."""
    counts = Counter[str]()
    wanted = apply_plainly(rules, leaves)
    dtypes = {array.dtype.name for array in (*leaves.values(), *wanted.values())}
    # A file is the same byte for byte; a checkpoint of Orbax's has names and times in it.
    end = "" if dtypes & NOT_IN_TENSORS or not wanted else ".safetensors"
    source, whole, target = folder / "source", folder / f"whole{end}", folder / f"made{end}"
    penstock.sync.save(source, nested(leaves))
    (folder / "rules.toml").write_text(Rules(rules, rest="keep").text)
    options = ("--rules", folder / "rules.toml", "--memory", rng.choice(["1MiB", "4MiB"]))
    since = time.monotonic()
    assert begin(source, whole, *options).wait() == 0
    longest = time.monotonic() - since
    for attempt in range(rng.choice([1, 1, 1, 2, 3])):
        process = begin(source, target, *options, *(["--resume"] if attempt else []))
        try:
            process.wait(rng.uniform(0, 1) * longest)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            counts["killed"] += 1
        if process.poll() == 0:
            counts["complete before they were killed"] += 1
            break
        if target.exists():  # then nothing but its end was left to do, and it must be whole
            counts["killed after they were published"] += 1
            break

    if not target.exists():
        assert begin(source, target, *options, "--resume").wait() == 0
        counts["resumed"] += 1

    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [target.name, "rules.toml", "source", whole.name]
    )
    if end:
        assert target.read_bytes() == whole.read_bytes()

    compare(named(penstock.sync.restore(target, split="." if end else None)), wanted)
    return counts


def kill_many(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Kill conversions of random trees until so many were; each is gone on with."""
    rng, counts = random.Random(seed), Counter[str]()

    @seeded(seed)
    @settings(
        max_examples=10 * kills,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # another tree is killed at another moment
        suppress_health_check=SLOW_TO_DRAW,
    )
    @given(trees_with_rules(most_axes=3, sizes=(1, 64)))
    def one(drawn: tuple[Leaves, list[Rule]]) -> None:
        if counts["killed"] >= kills:
            return
        with tempfile.TemporaryDirectory(dir=folder) as place:
            counts.update(kill_one(Path(place), *drawn, rng))

        counts.update([f"killed trees with {rule.operation}" for rule in drawn[1]])

    one()
    assert counts["killed"] >= kills, counts
    return counts


def main(given: Sequence[str] | None = None) -> int:
    """Run both parts; return 0, or raise at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(given)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    sys.stdout.write(f"seed {seed}\n")
    room = Path("/dev/shm")
    base = room if room.is_dir() and shutil.disk_usage(room).free > 2**30 else None
    for part, many in ((convert_many, options.trees), (kill_many, options.kills)):
        with tempfile.TemporaryDirectory(prefix="pk-", dir=base) as made:
            counts = part(Path(made), many, seed) if many else Counter[str]()

        for what, n in counts.most_common():
            sys.stdout.write(f"{n:>7,} {what}\n")

    sys.stdout.write("all as NumPy makes them, and whole\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
