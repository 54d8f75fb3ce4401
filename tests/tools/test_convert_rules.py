"""A conversion makes other leaves of what is stored, as rules say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from tests.byte_counting import CountingStore
from tests.plain_rules import apply_plainly, same_bits

import penstock
from penstock.cli import main
from penstock.errors import ChecksumError, RulesError
from penstock.rules import (
    Cast,
    Concat,
    Constant,
    Dequantize,
    Drop,
    Pad,
    PlannedLeaf,
    Rename,
    Repeat,
    Reshape,
    Rule,
    Rules,
    Select,
    Split,
    Stack,
    Transpose,
    Unstack,
    preview,
)

SMALL_PIECES = penstock.Config.load(environ={}, arguments={"save": {"piece_bytes": "40KiB"}})
RANDOM = np.random.default_rng(0)
BITS = RANDOM.integers(0, 2**32, (3, 60, 100), dtype=np.uint32).view(np.float32)
TREE: dict[str, Any] = {
    "layers": [{"qkv": BITS[at], "norm": np.full(8, float(at), np.float32)} for at in range(3)],
    "embed": np.linspace(-3, 300, 50_000).reshape(50, 1000),
    "empty": {},
    "step": 3,
    "name": "run",
}
RULES = Rules(
    [
        Split("layers.{i}.qkv", ["layers.{i}.q", "layers.{i}.k", "layers.{i}.v"], axis=1, sizes=(60, 20, 20)),
        Transpose("layers.{i}.q", axes=(1, 0)),
        Reshape("layers.{i}.q", shape=(4, 15, 60), from_shape=(60, 60)),
        Stack("layers.{i:int}.q", "stacked.q", axis=1),
        Stack("layers.{i:int}.norm", "stacked.norm"),
        Concat(["layers.{i}.v", "layers.{i}.k"], "vk.{i}", axis=1, sizes="equal"),
        Rename("embed", "embedding.table"),
        Transpose("embedding.table"),
    ],
    rest="keep",
)


@pytest.fixture(params=["plain", "coded", "directories", "safetensors"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "source"
    if request.param == "safetensors":
        penstock.sync.export_safetensors(TREE, path)
        return path

    form = {
        "plain": penstock.SaveFormat(),
        "coded": penstock.SaveFormat(codec="zstd:1"),
        "directories": penstock.SaveFormat(ocdbt=False, zarr=3),
    }[request.param]
    with penstock.sync.Checkpointer(save_format=form, config=SMALL_PIECES) as checkpointer:
        checkpointer.save(path, TREE).result()

    return path


def named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@pytest.mark.parametrize("memory", ["1GiB", "100KiB"])
@pytest.mark.parametrize("codec", ["none", "zstd:1"])
def test_rules_make_what_numpy_makes_and_their_inverse_makes_the_source(
    source: Path, tmp_path: Path, memory: str, codec: str
) -> None:
    report = penstock.sync.convert(
        source,
        tmp_path / "result",
        rules=RULES,
        save_format=penstock.SaveFormat(codec=codec),
        memory_limit=memory,
    )
    found = named(penstock.sync.restore(tmp_path / "result"))
    arrays = {name: leaf for name, leaf in named(TREE).items() if name not in {"step", "name"}}
    wanted = apply_plainly(RULES, arrays)
    assert found.keys() == wanted.keys() | {"step", "name"}
    for name, array in wanted.items():
        assert same_bits(found[name], array), name

    assert (found["step"], found["name"]) == (3, "run")
    assert report.peak_leased_bytes > 0

    penstock.sync.convert(tmp_path / "result", tmp_path / "back", rules=RULES.inverse(), memory_limit=memory)
    back = named(penstock.sync.restore(tmp_path / "back"))
    assert back.keys() == named(TREE).keys()
    for name, leaf in named(TREE).items():
        assert same_bits(np.asarray(back[name]), np.asarray(leaf)) or back[name] == leaf


def bytes_read() -> int:
    """Bytes that this process has read so far, from the page cache or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("kind", ["plain", "safetensors"])
def test_a_transposed_leaf_many_times_the_budget_stays_within_it(tmp_path: Path, kind: str) -> None:
    array = RANDOM.integers(0, 2**31, (1000, 4000), dtype=np.int32)
    if kind == "plain":
        penstock.sync.save(tmp_path / "source", {"w": array})
    else:
        penstock.sync.export_safetensors({"w": array}, tmp_path / "source")

    limit = 2 * 2**20
    before = bytes_read()
    report = penstock.sync.convert(
        tmp_path / "source",
        tmp_path / "result",
        rules=[Transpose("w"), Cast("w", dtype="int64")],
        memory_limit=limit,
        config=penstock.Config.load(environ={}, arguments={"save": {"piece_bytes": "128KiB"}}),
    )
    assert report.peak_leased_bytes <= limit
    # All of it once, to be compared; and the runs of each piece, with little of what is between them.
    assert bytes_read() - before < 4 * array.nbytes
    assert same_bits(penstock.sync.restore(tmp_path / "result")["w"], array.T.astype(np.int64))


@pytest.mark.parametrize("format_", ["orbax", "safetensors", "npz"])
def test_every_format_is_written(tmp_path: Path, format_: Any) -> None:
    penstock.sync.save(tmp_path / "source", {"layers": TREE["layers"]})
    ends = {"orbax": "", "safetensors": ".safetensors", "npz": ".npz"}[format_]
    penstock.sync.convert(
        tmp_path / "source", tmp_path / f"result{ends}", rules=[Stack("layers.{i:int}.{x}", "{x}", axis=-1)]
    )
    penstock.sync.convert(tmp_path / f"result{ends}", tmp_path / "read")
    found = penstock.sync.restore(tmp_path / "read")
    assert same_bits(found["qkv"], np.stack(list(BITS), -1))


def test_a_damaged_source_is_found(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "source", {"w": np.arange(100_000.0).reshape(100, 1000)})
    files = [path for path in (tmp_path / "source").rglob("*") if path.is_file()]
    data = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ChecksumError):
        penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=[Transpose("w")])

    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize("piece_bytes", [4000, 2**20])
@pytest.mark.parametrize("rows", [(40, 3), (3, 40, 3)], ids=str)
def test_each_of_several_places_that_a_piece_takes_from_one_range_is_compared(
    tmp_path: Path, rows: tuple[int, ...], piece_bytes: int
) -> None:
    array = np.arange(6000.0).reshape(60, 100)
    penstock.sync.save(tmp_path / "source", {"w": array})
    config = penstock.Config.load(environ={}, arguments={"save": {"piece_bytes": piece_bytes}})
    rules = [Select("w", indices=rows)]
    penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=rules, config=config)
    assert same_bits(penstock.sync.restore(tmp_path / "result")["w"], array[list(rows)])
    for row in rows:
        damaged = tmp_path / "damaged"
        shutil.copytree(tmp_path / "source", damaged)
        files = [path for path in damaged.rglob("*") if path.is_file()]
        data = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(data.read_bytes())
        content[content.index(array[row].tobytes()) + 300] ^= 1
        data.write_bytes(content)
        with pytest.raises(ChecksumError):
            penstock.sync.convert(damaged, tmp_path / "other", rules=rules, config=config)

        assert not (tmp_path / "other").exists()
        shutil.rmtree(damaged)


def test_what_no_rule_takes_and_what_no_source_gives_is_one_error_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    penstock.sync.save(tmp_path / "source", {"a": np.ones(3), "b": np.ones((2, 3)), "l": [np.ones(2)] * 2})
    rules = [
        Rename("aa", "x"),
        Stack("l.{i:int}.w", "l.w"),
        Concat(["a", "c"], "ac"),
        Transpose("a", axes=(1, 0)),
        Split("b", ["q", "k"], axis=1),
        Reshape("b", shape=(5,)),
    ]
    with pytest.raises(RulesError) as raised:
        penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=rules)

    for number, problem in enumerate(
        [
            "no leaf is named 'aa'; did you mean 'a'?",
            "no leaf is named 'l.{i:int}.w'",
            "'a' is there, and 'c' is not",
            "'a' has the shape [3], and not 2 axes",
            "'b' has 3 along axis 1, which 2 equal parts do not divide",
            "'b' has the shape [2, 3], which does not fit [5]",
            "no rule takes 'a'",
            "no rule takes 'b'",
            "no rule takes 'l.0'",
            "no rule takes 'l.1'",
        ]
    ):
        assert problem in raised.value.problems[number]

    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (Rename("a", "b"), "two leaves would have the name 'b'"),
        (Rename("a", "b.c"), "would lie within the leaf"),
        (Cast("a", dtype="float31"), "no dtype"),
        (Cast("a", dtype="float32", from_dtype="int8"), "is float64, not int8"),
        (Concat(["a", "b"], "c"), "has parts of float64 and float32; cast them first"),
        (Stack(["b", "d"], "c"), "has parts of the shapes [2, 3] and [3, 2]"),
        (Select("a", start=4), "has 3 along axis 0, and start is 4"),
        (Select("a", indices=(3,)), "no index 3"),
        (Pad("a", to_size=2), "is more than 2"),
        (Transpose("name"), "is a string"),
        (Repeat("a", axis=1, times=2), "no axis 1"),
        (Constant("a"), "there is a leaf 'a' already"),
        (Constant("c", dtype="nothing"), "no dtype"),
        (Unstack("b", ["x", "y", "z"]), "has 2 along axis 0, and 3 names in `to`"),
        (Dequantize("a", scales="c"), "its scales 'c' are not"),
        (Dequantize("b", scales="a"), "has 2 along axis 0, and 3 scales"),
    ],
)
def test_a_rule_that_cannot_be_carried_out_says_why(tmp_path: Path, rule: Rule, problem: str) -> None:
    tree = {"a": np.ones(3), "b": np.ones((2, 3), np.float32), "d": np.ones((3, 2), np.float32), "name": "x"}
    penstock.sync.save(tmp_path / "source", tree)
    with pytest.raises(RulesError) as raised:
        penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=Rules([rule], rest="keep"))

    assert problem in str(raised.value)


def test_numbers_with_a_hole_are_not_stacked(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "source", {"l": {"0": np.ones(1), "2": np.ones(1)}})
    with pytest.raises(RulesError, match="and 1 is not there: 0, 2"):
        penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=[Stack("l.{i:int}", "l")])


def test_rules_may_find_nothing_if_they_are_optional(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "source", {"a": np.ones(1)})
    rules = [Drop("none.{x}", optional=True), Rename("a", "b")]
    penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=rules)
    assert list(penstock.sync.restore(tmp_path / "result")) == ["b"]


def test_a_cast_of_all_leaves_passes_over_counters_and_texts(tmp_path: Path) -> None:
    tree = {"w": np.ones(3, np.float32), "ids": np.arange(3), "n": 3, "s": "x"}
    penstock.sync.save(tmp_path / "source", tree)
    penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=[Cast("**", dtype="bfloat16")])
    found = penstock.sync.restore(tmp_path / "result")
    assert (found["w"].dtype, found["ids"].dtype) == (ml_dtypes.bfloat16, np.int64)
    assert (found["n"], found["s"]) == (3, "x")


@pytest.mark.parametrize(
    ("values", "dtype", "most", "fits"),
    [
        (np.array([1, 2.5, np.nan, np.inf, -0.0]), "float32", 0, True),
        (np.array([0.1]), "float32", 0, False),
        (np.array([0.1]), "float32", 1e-7, True),
        (np.array([1e300]), "float32", 0.5, False),
        (np.array([1.0, 1.01], np.float32), "bfloat16", 0.01, True),
        (np.array([1.0, 1.01], np.float32), "bfloat16", 0.0001, False),
        (np.array([1e-6], np.float32), "float8_e4m3fn", 0.1, True),  # below its smallest normal number
        (np.array([-1]), "uint64", 0, False),
        (np.array([2**53 + 1]), "float64", 0, False),
        (np.array([300]), "int8", 0.5, False),
        (np.array([np.nan]), "int8", 0, False),
    ],
)
def test_a_cast_beyond_its_error_is_refused_and_nothing_is_left(
    tmp_path: Path, values: Any, dtype: str, most: float, fits: bool
) -> None:
    penstock.sync.save(tmp_path / "source", {"w": values})
    rules = [Cast("w", dtype=dtype, max_cast_error=most)]
    if fits:
        penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=rules)
        assert same_bits(penstock.sync.restore(tmp_path / "result")["w"], values.astype(dtype))
    else:
        with pytest.raises(RulesError, match="max_cast_error"):
            penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=rules)

        assert not (tmp_path / "result").exists()


SHAPE = (200, 300)
FP8 = RANDOM.normal(size=SHAPE).astype(ml_dtypes.float8_e4m3fn)
WIDE = FP8.astype(np.float32)


@pytest.mark.parametrize(
    ("scales", "options", "factor"),
    [
        ((2, 3), {"block": (128, 128)}, lambda s: np.kron(s, np.ones((128, 128), np.float32))[:200, :300]),
        ((2, 3), {}, lambda s: np.kron(s, np.ones((100, 100), np.float32))),
        ((200,), {}, lambda s: s[:, None]),
        ((300,), {"axis": 1}, lambda s: s[None]),
        ((200, 1), {}, lambda s: s),
        ((), {}, lambda s: s),
        ((1,), {}, lambda s: s),
    ],
)
def test_quantized_numbers_become_plain_ones(
    tmp_path: Path, scales: tuple[int, ...], options: Any, factor: Any
) -> None:
    scale = RANDOM.uniform(0.5, 2, scales).astype(np.float32)
    tree = {"m": {"weight": FP8, "weight_scale_inv": scale, "bias": np.ones(3)}}
    penstock.sync.save(tmp_path / "source", tree)
    rule = Dequantize("{x...}.weight", scales="{x...}.weight_scale_inv", dtype="bfloat16", **options)
    penstock.sync.convert(
        tmp_path / "source",
        tmp_path / "result",
        rules=Rules([rule, Transpose("m.weight")], rest="keep"),
        memory_limit="200KiB",
    )
    found = penstock.sync.restore(tmp_path / "result")["m"]
    assert sorted(found) == ["bias", "weight"]
    assert same_bits(found["weight"], (WIDE * factor(scale)).astype(ml_dtypes.bfloat16).T)


def test_mxfp4_becomes_plain_numbers(tmp_path: Path) -> None:
    packed = RANDOM.integers(0, 256, (3, 40, 5, 16), dtype=np.uint8)
    scales = RANDOM.integers(100, 140, (3, 40, 5), dtype=np.uint8)
    penstock.sync.save(tmp_path / "source", {"w_blocks": packed, "w_scales": scales})
    rule = Dequantize("{x}_blocks", "{x}", scales="{x}_scales", format="mxfp4", dtype="float32")
    penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=[rule], memory_limit="100KiB")

    found = penstock.sync.restore(tmp_path / "result")["w"]
    four = np.stack([packed & 15, packed >> 4], -1).astype(np.uint8)
    numbers = four.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(3, 40, 5, 32)
    wanted = numbers * np.exp2(scales.astype(np.float32) - 127)[..., None]
    assert same_bits(found, wanted.reshape(3, 40, 160))


def test_rules_reach_the_trees_of_all_items(tmp_path: Path) -> None:
    items = {"state": {"w": np.arange(6.0).reshape(2, 3)}, "other": {"w": np.ones((1, 2))}}
    penstock.sync.save(tmp_path / "source", penstock.Composite(**items))
    penstock.sync.convert(tmp_path / "source", tmp_path / "result", rules=[Transpose("w", "v")])
    assert same_bits(penstock.sync.restore(tmp_path / "result", item="state")["v"], items["state"]["w"].T)
    assert same_bits(penstock.sync.restore(tmp_path / "result", item="other")["v"], items["other"]["w"].T)


async def test_a_preview_says_what_rules_make_of_what(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "source", {"l": [np.ones((2, 3)), np.ones((2, 3))], "b": np.ones(4)})
    rules = [Stack("l.{i:int}", "l", axis=0), Transpose("l"), Rename("b", "c")]
    found = await preview(tmp_path / "source", rules)
    assert sorted(found, key=lambda leaf: leaf.name) == [
        PlannedLeaf("c", (4,), "float64", 32, ("b",), (rules[2],), 32, streams=True),
        PlannedLeaf("l", (3, 2, 2), "float64", 96, ("l.0", "l.1"), (*rules[:2],), 96, streams=False),
    ]


def test_what_was_made_tells_of_what_and_by_which_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"l": [np.ones((2, 3)), np.ones((2, 3))], "b": np.ones(4), "c": np.ones(5)}
    penstock.sync.save(tmp_path / "source", tree, custom_metadata={"by": "me"})
    rules = Rules([Stack("l.{i:int}", "l", axis=0), Transpose("l"), Rename("b", "d")], rest="keep")
    for source, result, given in (("source", "made", rules), ("made", "back", rules.inverse())):
        penstock.sync.convert(tmp_path / source, tmp_path / result, rules=given)

    made = dict(penstock.sync.metadata(tmp_path / "made").custom_metadata or {})
    assert made["by"] == "me"
    record = made["made_by_rules"]
    assert record["source"] == str(tmp_path / "source")
    assert record["rules"] == [rule.table() for rule in rules]
    assert record["leaves"].keys() == {"l", "d"}
    assert record["leaves"]["l"]["rules"] == [1, 2]
    assert list(record["leaves"]["l"]["of"]) == ["l.0", "l.1"]

    back = dict(penstock.sync.metadata(tmp_path / "back").custom_metadata or {})["made_by_rules"]
    assert back["before"] == record

    assert main(["--table", "show", str(tmp_path / "made")]) == 0
    said = capsys.readouterr()
    assert "by 3 rules" in said.out + said.err
    assert "l: of l.0 and l.1, by 1 stack, 2 transpose" in said.out + said.err


@pytest.mark.parametrize("record", [3, {}, {"rules": 1, "leaves": []}, {"rules": [1], "leaves": {"a": [2]}}])
def test_any_record_of_rules_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: object
) -> None:
    penstock.sync.save(tmp_path / "made", {"a": np.ones(1)}, custom_metadata={"made_by_rules": record})
    assert main(["--table", "show", str(tmp_path / "made")]) == 0
    assert "float64" in capsys.readouterr().out


def test_a_leaf_that_needs_a_temporary_file_is_read_once_for_all_chunks_of_the_result(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (1000, 500), dtype=np.uint8)
    penstock.sync.export_safetensors({"w": array}, tmp_path / "source.safetensors")
    store = CountingStore()

    penstock.sync.convert(
        tmp_path / "source.safetensors",
        tmp_path / "made",
        rules=[Transpose("w")],
        save_format=penstock.SaveFormat(chunk_byte_size=50_000),
        store=store,
        memory_limit=64 * 1024,
    )

    np.testing.assert_array_equal(penstock.sync.restore(tmp_path / "made")["w"], array.T)
    assert store.nbytes < 2 * array.nbytes
