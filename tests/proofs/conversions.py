"""Random trees with random rules, converted and compared with NumPy; some are killed and resumed.

`make convert-proof`. Each conversion reads one format and writes another, in small pieces; a restore with the
same rules must give the same. Of a larger tree, conversions by the command are killed (SIGKILL) after a
random time and gone on with, perhaps more than once: the file must be, byte for byte, the one that a
conversion writes that nobody interrupted, and before that nothing may stand under its name.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from tests.plain_rules import Leaves, apply_plainly, same_bits, trees_with_rules

import penstock
from penstock.rules import Cast, Concat, Rename, Rule, Rules, Split, Stack, Transpose

SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

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
    """Convert a tree with rules, restore it with the same, and compare both with NumPy."""
    wanted = apply_plainly(rules, leaves)
    dtypes = {array.dtype.name for array in (*leaves.values(), *wanted.values())}
    if dtypes & NOT_IN_TENSORS or not wanted:
        source, target = ("plain" if each == "safetensors" else each for each in (source, target))

    path, made = folder / f"source.{source}", folder / f"made.{target}"
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


LARGE = Rules(
    [
        Stack("layers.{i:int}.w", "layers.w", axis=1),
        Transpose("layers.w"),
        Split("qkv", ["q", "k", "v"], axis=1),
        Concat(["v", "k"], "vk", axis=1),
        Cast("q", dtype="bfloat16"),
        Rename("embed", "table"),
    ]
)


def kill_many(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Kill conversions of one tree and go on with them; return how many were killed, and how often."""
    rng, counts = random.Random(seed), Counter[str]()
    numbers = np.random.default_rng(seed)
    tree: Leaves = {"qkv": numbers.normal(size=(900, 1800)), "embed": numbers.normal(size=(3000, 700))}
    for at in range(6):
        tree[f"layers.{at}.w"] = numbers.integers(0, 2**31, (700, 900), dtype=np.int32)

    penstock.sync.save(folder / "source", nested(tree))
    (folder / "rules.toml").write_text(LARGE.text)
    command = [sys.executable, "-m", "penstock", "convert", str(folder / "source")]
    options = ["--rules", str(folder / "rules.toml"), "--memory", "16MiB"]

    def run(target: Path, *more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, str(target), *options, *more], stdout=subprocess.DEVNULL)

    whole, since = folder / "whole.safetensors", time.monotonic()
    assert run(whole).wait() == 0
    longest = time.monotonic() - since
    target = folder / "made.safetensors"
    while counts["killed"] < kills:
        for attempt in range(rng.choice([1, 1, 1, 2, 3])):
            process = run(target, "--resume") if attempt else run(target)
            try:
                process.wait(rng.uniform(0.3, 1) * longest)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                counts["killed"] += 1
            if process.returncode == 0:
                counts["complete before it was killed"] += 1
                break
            if target.exists():  # then nothing but its end was left to do, and it must be whole
                counts["killed after it was published"] += 1
                break

        if not target.exists():
            assert run(target, "--resume").wait() == 0
            counts["resumed"] += 1

        assert target.read_bytes() == whole.read_bytes()
        assert sorted(path.name for path in folder.iterdir()) == [
            *("made.safetensors", "rules.toml", "source", "whole.safetensors"),
        ]
        target.unlink()

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
