"""The stages of docs/howto/write-a-stage.md run as they are written, and none is long."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import penstock
from penstock.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.pipelines import restore_pipeline

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "write-a-stage.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the examples of stages define, in order."""
    pytest.importorskip("cryptography")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    examples = [block for block in blocks if "class " in block or "def " in block]
    assert len(examples) == 3
    found: dict[str, Any] = {}
    for example in examples:
        for node in ast.parse(example).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                lines = (example.splitlines()[node.lineno - 1 : node.end_lineno]) if node.end_lineno else []
                assert sum(bool(line.strip()) for line in lines) <= 15

        exec(compile(example, PAGE.name, "exec"), found)

    return found


async def test_the_examples_run(names: dict[str, Any], tmp_path: Path) -> None:
    state: Any = {"w": jnp.arange(100_000) / 8, "b": jnp.ones(3), "step": 7}
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "counted", state, pipeline=names["counted"]))
        assert {name for name, *_ in names["digests"]} == {"w", "b", "step"}

        await (await checkpointer.save(tmp_path / "quantised", state, pipeline=names["quantised"]))
        assert (await checkpointer.restore(tmp_path / "quantised"))["w"].dtype == jnp.bfloat16
        back = await checkpointer.restore(tmp_path / "quantised", like=state, dtype="like")
        assert back["w"].dtype == jnp.float32

        await (await checkpointer.save(tmp_path / "sealed", state, pipeline=names["sealed"]))
        back = await checkpointer.restore(tmp_path / "sealed", pipeline=names["opened"])
        assert jnp.array_equal(back["w"], state["w"])
        assert jnp.array_equal(back["b"], state["b"])
        with pytest.raises(UnsupportedFormatError, match=names["CODEC"]):
            await checkpointer.restore(tmp_path / "sealed")

        another = restore_pipeline().insert_after("plan", names["Decrypt"](bytes(32)))
        with pytest.raises(CorruptCheckpointError, match=names["CODEC"]):
            await checkpointer.restore(tmp_path / "sealed", pipeline=another)
