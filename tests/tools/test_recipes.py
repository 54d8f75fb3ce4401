"""Recipes: files that are whole, and the order of a model's modules on the way back.

That both models compute the same is what `make recipes-proof` shows, which needs torch and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import penstock
from penstock.cli import main
from penstock.errors import SpecError
from penstock.rules import RECIPES, Concat, Rename, Rules, Unstack, load_recipe

CORPUS: Final = Path(__file__).parents[1] / "corpus/huggingface"
"""A tiny Llama as transformers wrote it, see `make.py` there."""


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_every_file_is_a_recipe_and_every_recipe_a_file() -> None:
    folder = Path(penstock.__file__).parent / "recipes"

    assert {path.stem for path in folder.iterdir()} == RECIPES


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_each_has_an_inverse_whose_inverse_it_is(name: str) -> None:
    rules = load_recipe(name)

    assert rules.inverse().inverse() == rules
    assert all(rule.to is not None for rule in rules)


def test_a_name_that_is_none() -> None:
    with pytest.raises(SpecError, match=r"there is no recipe 'lama'.*llama"):
        load_recipe("lama")


@pytest.mark.parametrize(("source", "size"), [("whole", "50GB"), ("sharded", "0.5KB")])
def test_there_and_back_gives_the_bytes_of_save_pretrained(
    tmp_path: Path, source: str, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    jax, back = str(tmp_path / "jax"), str(tmp_path / "back")

    assert main(["convert", str(CORPUS / source), jax, "--recipe", "llama"]) == 0
    to = ["--format", "huggingface", "--max-shard-size", size]
    assert main(["convert", jax, back, "--recipe", "llama", "--inverse", *to]) == 0

    assert files_in(tmp_path / "back") == files_in(CORPUS / source)
    params = penstock.sync.restore(jax)
    weights = penstock.sync.restore(CORPUS / "whole", split=".")
    for number in "01":
        projection = params["model"]["layers"][number]["mlp"]["up_proj"]["kernel"]
        np.testing.assert_array_equal(
            projection, weights["model"]["layers"][number]["mlp"]["up_proj"]["weight"].T
        )


def test_a_recipe_of_another_family_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(CORPUS / "whole"), str(tmp_path / "jax"), "--recipe", "gpt2"]) == 1

    said = capsys.readouterr().err
    assert "transformer.wte.weight" in said
    assert "model.embed_tokens.weight" in said
    assert not (tmp_path / "jax").exists()


def test_a_recipe_and_a_file_of_rules_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "a", "b", "--recipe", "llama", "--rules", "rules.toml"]) == 1

    assert "give one of them" in capsys.readouterr().err


class TestOrder:
    def test_of_a_model_is_that_of_its_rules(self) -> None:
        order = json.loads((CORPUS / "order.json").read_text())

        assert load_recipe("llama").inverse().in_order(sorted(order)) == order

    def test_layers_go_together_and_by_number(self) -> None:
        rules = Rules([Rename("z.{i}.w", "x.{i}.w"), Rename("z.{i}.a", "x.{i}.a"), Rename("q", "head")])

        found = rules.in_order(["head", "x.10.a", "x.2.w", "x.10.w", "x.2.a"])

        assert found == ["x.2.w", "x.2.a", "x.10.w", "x.10.a", "head"]

    def test_names_without_a_rule_are_last_and_parts_in_their_order(self) -> None:
        rules = Rules([Concat(["q", "b"], "qb", sizes=(1, 2)), Unstack("h.w", "h.{i:int}.w")], rest="keep")

        assert rules.inverse().in_order(["b", "h.w", "z", "q", "a"]) == ["q", "b", "h.w", "a", "z"]
