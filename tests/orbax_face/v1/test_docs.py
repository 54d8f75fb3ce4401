"""The page for those who move runs as it is printed."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "move-from-orbax-v1.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


class Dataset:
    def __init__(self, position: int) -> None:
        self.position = position


class DatasetHandler:
    async def save(self, directory: Any, checkpointable: Dataset) -> Awaitable[None]:
        position = checkpointable.position

        async def write() -> None:
            (Path(await directory.await_creation()) / "position").write_text(str(position))

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Dataset]:
        async def read() -> Dataset:
            return Dataset(int((Path(directory) / "position").read_text()))

        return read()

    async def metadata(self, directory: Any) -> None:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Dataset)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """What the snippets take for granted."""
    import penstock.orbax.v1 as ocp

    state = {"params": jnp.ones((8, 4)), "table": np.arange(3), "step": 1, "rng": np.ones(2), "opt_state": 2}
    device = jax.devices()[0]
    return {
        "ocp": ocp,
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "path": tmp_path / "checkpoint",
        "state": state,
        "abstract_state": state,
        "sharding": jax.sharding.SingleDeviceSharding(device),
        "params": state["params"],
        "opt_state": state["opt_state"],
        "dataset": Dataset(7),
        "DatasetHandler": DatasetHandler,
    }


async def run(snippet: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a snippet, which may await."""
    body = "\n".join(f"    {line}" for line in snippet.splitlines())
    scope = dict(names)
    code = f"async def snippet(names):\n    {', '.join(names)} = names\n{body}\n    return locals()"
    exec(code, scope)
    found: dict[str, Any] = await scope["snippet"](list(names.values()))
    return found


async def test_the_import_line(names: dict[str, Any]) -> None:
    found = await run(SNIPPETS[0], names)

    np.testing.assert_array_equal(found["state"]["params"], names["state"]["params"])


async def test_the_example_with_an_event_loop_runs(names: dict[str, Any]) -> None:
    found = await run(SNIPPETS[1], names)

    np.testing.assert_array_equal(found["state"]["params"], names["state"]["params"])


async def test_abstract_leaves(names: dict[str, Any]) -> None:
    names["ocp"].save(names["path"], names["state"])
    state = (await run(SNIPPETS[2], names))["state"]

    assert state["params"].dtype == jnp.bfloat16
    assert state["table"].dtype == np.float32
    assert state["step"] == 1
    assert state["opt_state"] is ...
    np.testing.assert_array_equal(state["rng"], np.ones(2))


async def test_steps(names: dict[str, Any]) -> None:
    await run(SNIPPETS[-1], names)

    with names["ocp"].training.Checkpointer(names["path"].parent / "run") as checkpointer:
        assert [found.step for found in checkpointer.checkpoints] == [7, 8, 9]


async def test_items(names: dict[str, Any]) -> None:
    found = await run(SNIPPETS[3], names)

    assert found["loaded"]["config"] == {"lr": 0.1}
    assert "dataset" not in found["loaded"]
    with found["context"]:
        assert names["ocp"].load_checkpointables(names["path"])["dataset"].position == 7


async def test_parts(names: dict[str, Any]) -> None:
    await run(SNIPPETS[4], names)

    assert names["ocp"].load(names["path"]).keys() == {"params", "opt_state"}
