"""docs/reference/rules.md is what the declarations of the rules say, and each example in it runs."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.docs.blocks import ROOT, blocks

import penstock
from penstock.kernel.rules import RULES, parse_rules
from penstock.rules import Rules

PAGE = "docs/reference/rules.md"
SQUARE = np.arange(16, dtype=np.float32).reshape(4, 4)
LEAVES: dict[str, dict[str, Any]] = {
    "rename": {"model.layers.0.mlp.up_proj.weight": SQUARE},
    "cast": {"w": SQUARE},
    "transpose": {"layers.0.up.kernel": SQUARE},
    "reshape": {"layers.0.q.kernel": np.zeros((16, 32))},
    "split": {"h.0.attn.weight": np.zeros((4, 12))},
    "concat": {f"h.0.{name}": SQUARE for name in "qkv"},
    "stack": {f"layers.{at}.up.kernel": SQUARE for at in range(3)},
    "unstack": {"layers.up.kernel": np.zeros((3, 4, 4))},
    "select": {"embed.weight": np.zeros((32003, 2))},
    "pad": {"embed.weight": np.zeros((100, 2))},
    "repeat": {"layers.0.k.kernel": SQUARE},
    "dequantize": {
        "model.up.weight": np.zeros((200, 130), ml_dtypes.float8_e4m3fn),
        "model.up.weight_scale_inv": np.ones((2, 2), np.float32),
    },
    "constant": {"first.w": SQUARE},
    "drop": {"model.rotary_emb.inv_freq": np.zeros(4)},
}
MADE = {
    "rename": {"layers.0.up.kernel": (4, 4)},
    "cast": {"w": (4, 4)},
    "transpose": {"layers.0.up.kernel": (4, 4)},
    "reshape": {"layers.0.q.kernel": (16, 8, 4)},
    "split": {f"h.0.{name}": (4, 4) for name in "qkv"},
    "concat": {"h.0.qkv": (12, 4)},
    "stack": {"layers.up.kernel": (3, 4, 4)},
    "unstack": {f"layers.{at}.up.kernel": (4, 4) for at in range(3)},
    "select": {"embed.weight": (32000, 2)},
    "pad": {"embed.weight": (128, 2)},
    "repeat": {"layers.0.k.kernel": (4, 16)},
    "dequantize": {"model.up.weight": (200, 130)},
    "constant": {"first.w": (4, 4), "final_norm.bias": (64,)},
    "drop": {},
}


def test_the_page_is_what_the_declarations_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "site" / "rule_reference.py"))["reference"]()
    assert (ROOT / PAGE).read_text() == made, "run python docs/site/rule_reference.py"


@pytest.mark.parametrize("number", range(len(RULES)), ids=list(RULES))
def test_the_example_of_each_rule_runs(tmp_path: Path, number: int) -> None:
    text = blocks(PAGE, "toml")[number].text
    rules = Rules(parse_rules(tomllib.loads(text)), rest="keep")
    operation = rules[0].operation
    penstock.sync.save(tmp_path / "source", LEAVES[operation])
    found = penstock.sync.restore(tmp_path / "source", rules=rules)
    assert {name: array.shape for name, array in found.items()} == MADE[operation]
