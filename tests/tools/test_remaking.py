"""`penstock verify` makes again what rules made, and compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.rules import Cast, Constant, Rename, Rules, Stack, Transpose

RULES: Final = Rules(
    [
        Stack("l.{i:int}", "layers"),
        Transpose("layers", axes=(2, 0, 1)),
        Cast("layers", dtype="bfloat16"),
        Rename("w", "v"),
        Constant("bias", value=0.5, dtype="float32", shape=(3,)),
    ],
    rest="keep",
)


def tree(seed: int = 0) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    layers = {str(at): numbers.standard_normal((50, 40), np.float32) for at in range(3)}
    return {"l": layers, "w": np.arange(7), "note": "text", "none": np.zeros((0, 2))}


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["verify", *arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, document


@pytest.mark.parametrize("name", ["made", "made.safetensors"])
@pytest.mark.parametrize("source", ["plain", "digests", "source.safetensors"])
def test_all_that_rules_made_is_made_again_and_compared(
    tmp_path: Path, name: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if source.endswith(".safetensors"):
        penstock.sync.export_safetensors(tree(), tmp_path / source)
    else:
        compare = "digest" if source == "digests" else "identity"
        penstock.sync.save(tmp_path / source, tree(), compare=compare)  # type: ignore[arg-type]  # one of both
    penstock.sync.convert(tmp_path / source, tmp_path / name, rules=RULES)

    status, document = verified(capsys, str(tmp_path / name))

    assert status == 0
    (made,) = document["made_by_rules"]
    assert set(made["same"]) == {"layers", "v", "bias"}
    assert made["differing"] == made["changed"] == []
    assert made["problem"] is None
    assert made["nbytes"] == 50 * 40 * 3 * 2 + 7 * 8 + 12

    assert main(["--table", "verify", str(tmp_path / name)]) == 0
    said = capsys.readouterr()
    assert "3 leaves made again, all the same" in said.out + said.err


def test_other_names_dtypes_and_keys_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    penstock.sync.export_safetensors(tree(), tmp_path / "source.safetensors")
    options: Any = {"rename": {"layers": "x.y"}, "dtype": {"v": "int32"}, "split": "/"}
    penstock.sync.convert(tmp_path / "source.safetensors", tmp_path / "made", rules=RULES, **options)

    status, document = verified(capsys, str(tmp_path / "made"))

    assert status == 0
    assert set(document["made_by_rules"][0]["same"]) == {"x.y", "v", "bias"}


def test_a_source_that_changed_is_told_by_its_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penstock.sync.save(tmp_path / "source", tree())
    penstock.sync.convert(tmp_path / "source", tmp_path / "made", rules=RULES)
    penstock.sync.save(tmp_path / "source", {**tree(1), "w": np.arange(7)}, overwrite=True)

    status, document = verified(capsys, str(tmp_path / "made"))

    assert status == 0  # what was made is as it was made
    (made,) = document["made_by_rules"]
    assert made["changed"] == ["layers"]
    assert set(made["same"]) == {"v", "bias"}


def test_what_is_not_what_the_rules_make_has_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penstock.sync.save(tmp_path / "source", tree())
    penstock.sync.convert(tmp_path / "source", tmp_path / "made", rules=RULES)
    custom = penstock.sync.metadata(tmp_path / "made").custom_metadata
    found = penstock.sync.restore(tmp_path / "made")
    layers = np.array(found["layers"])
    layers.view(np.uint16)[39, 2, 49] ^= 1  # the last bit of the last element
    forged = {**found, "layers": layers, "bias": np.zeros((4,), np.float32)}
    penstock.sync.save(tmp_path / "made", forged, custom_metadata=custom, overwrite=True)

    status, document = verified(capsys, str(tmp_path / "made"))

    assert status == 6
    (made,) = document["made_by_rules"]
    assert set(made["differing"]) == {"layers", "bias"}
    assert main(["--table", "verify", str(tmp_path / "made")]) == 6
    said = capsys.readouterr()
    assert "DIFFER" in said.out + said.err
    assert "layers" in said.out + said.err

    status, document = verified(capsys, str(tmp_path / "made"), "--no-sources")
    assert status == 0
    assert "made_by_rules" not in document


def test_without_its_source_it_is_said_what_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penstock.sync.save(tmp_path / "source", tree())
    penstock.sync.convert(tmp_path / "source", tmp_path / "made", rules=RULES)
    (tmp_path / "source").rename(tmp_path / "elsewhere")

    assert main(["--table", "verify", str(tmp_path / "made")]) == 0
    said = capsys.readouterr()
    assert f"made of {tmp_path / 'source'} by 5 rules" in said.out + said.err
    assert "not made again: it is not there" in said.out + said.err

    status, document = verified(capsys, str(tmp_path / "made"), "--source", str(tmp_path / "elsewhere"))
    assert status == 0
    assert len(document["made_by_rules"][0]["same"]) == 3

    penstock.sync.save(tmp_path / "source", {"w": np.arange(7)})  # to which the rules do not fit
    status, document = verified(capsys, str(tmp_path / "made"))
    assert status == 0
    assert "no leaf is named" in document["made_by_rules"][0]["problem"]


def test_no_bucket_is_asked_because_a_record_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"source": "s3://someone/else", "rules": [], "leaves": {}}
    penstock.sync.save(tmp_path / "made", {"a": np.ones(1)}, custom_metadata={"made_by_rules": record})

    status, document = verified(capsys, str(tmp_path / "made"))

    assert status == 0
    assert "if --source says so" in document["made_by_rules"][0]["problem"]


@pytest.mark.parametrize(
    "record",
    [
        3,
        {},
        {"source": 1},
        {"source": "x", "rules": [3], "leaves": {"a": {"of": {}}}},
        {"leaves": {"a": 3}},
        {"leaves": {"a": {"of": [1]}}},
        {"split": 3},
        {"item": 3},
    ],
)
def test_any_record_may_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], record: object) -> None:
    if isinstance(record, dict) and record.keys() & {"leaves", "split", "item"}:
        penstock.sync.save(tmp_path / "source", {"a": np.ones(1)})
        record = {"source": str(tmp_path / "source"), "rules": [], "leaves": {}} | record

    penstock.sync.save(tmp_path / "made", {"a": np.ones(1)}, custom_metadata={"made_by_rules": record})

    status, _ = verified(capsys, str(tmp_path / "made"))

    assert status == 0
