"""One process of a job that runs the blocks of docs/howto/many-processes.md; see test_docs_processes.py."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
from tests.docs.blocks import blocks, run_block

PAGE = "docs/howto/many-processes.md"


async def main(shared: str, own: str) -> None:
    """Run the blocks in order. Each begins with the names that a reader has there."""
    jax: Any = import_module("jax")  # annotates little of this

    replaced = {
        "/shared/": f"{shared}/",
        "/scratch/": f"{own}/",
        "s3://bucket/": f"{shared}/bucket/",
        "/nvme": f"{own}/nvme",
    }
    first, *others = blocks(PAGE, "python")
    initialize, _, rest = first.text.partition("\n")
    exec(initialize, {"jax": jax})  # what the page begins with, before anything else

    import numpy as np

    import penstock
    from penstock.steps import KeepLast

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    weights = np.arange(8.0, dtype=np.float32)
    params = {"w": jax.make_array_from_callback((8,), everywhere, weights.__getitem__)}
    iterator = SimpleNamespace(get_state=lambda: {"rows": [jax.process_index()]})
    names: dict[str, Any] = {
        "penstock": penstock,
        "KeepLast": KeepLast,
        "params": params,
        "iterator": iterator,
    }
    texts = [rest, *(block.text for block in others)]
    for text in texts:
        async with penstock.Checkpointer() as checkpointer:
            found: dict[str, Any] = {
                **names,
                "checkpointer": checkpointer,
                "state": {"params": params, "step": 100},
                "step": 100,
            }
            await run_block(PAGE, text, found, replaced)
        assert np.asarray(found["state"]["params"]["w"]).tolist() == list(range(8))

    sys.stdout.write(f"ran {len(texts)} blocks of {jax.process_count()} processes\n")


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(exist_ok=True)
    anyio.run(main, sys.argv[1], sys.argv[2])
