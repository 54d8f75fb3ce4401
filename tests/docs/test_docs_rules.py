"""docs/howto/change-checkpoints.md and docs/reference/api/rules.md: their rules do what they say."""

from __future__ import annotations

import shlex
from pathlib import Path

import anyio
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.docs.blocks import blocks, run_page
from tests.docs.page_settings import setting
from tests.plain_rules import same_bits

import penstock
from penstock.cli import main

HOWTO = "docs/howto/change-checkpoints.md"
PAGES = ["change-checkpoints.md"]
"""Whose blocks are run here."""


def test_the_commands_of_the_page_convert_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ups = [np.full((2, 3), float(number), np.float32) for number in range(3)]
    tree = {f"model.layers.{number}.mlp.up_proj.weight": up for number, up in enumerate(ups)}
    tree["model.qkv.weight"] = np.arange(12, dtype=np.float32).reshape(6, 2)
    save_file(tree, "model.safetensors")
    (rules,) = [block.text for block in blocks(HOWTO, "toml")]
    Path("rules.toml").write_text(rules)

    lines = [line for block in blocks(HOWTO, "console") for line in block.text.splitlines()]
    commands = [line for line in lines if line.startswith("$")]
    assert len(commands) == 4
    for command in commands:
        assert main(shlex.split(command.removeprefix("$ penstock "))) == 0
        assert not capsys.readouterr().err

    made = penstock.sync.restore("converted")
    assert same_bits(made["layers"]["up"]["kernel"], np.stack(ups).swapaxes(1, 2))
    back = penstock.sync.restore("back.safetensors")
    assert back.keys() == tree.keys()
    assert all(same_bits(back[name], array) for name, array in tree.items())


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        async with setting(HOWTO) as names:
            made = await run_page(HOWTO, names, {})
            assert made["params"]["q"].shape == (4, 2)

    anyio.run(run)
