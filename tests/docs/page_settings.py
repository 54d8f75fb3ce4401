"""What the pages of the documentation take for granted: names, files, and commands that are to fail."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.docs.blocks import ROOT, pages
from tests.handlers.stores.buckets.bucket_rig import Bucket

import penstock
from penstock.steps import Disk, StepNames

__all__ = (
    "COMMANDS",
    "REPLACED",
    "SLOW",
    "TEXT_ONLY",
    "made_for_commands",
    "setting",
    "with_own_tests",
)


def with_own_tests() -> set[str]:
    """Pages whose blocks a test of their own runs: one that names the page, and is not about tables alone."""
    tests = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path.name not in _OF_TABLES]
    text = "".join(path.read_text() for path in tests)
    named = {page for page in pages() if f'"{Path(page).name}"' in text}
    return {page for page in named if Path(page).name not in ("README.md", "index.md", "errors.md")}


_OF_TABLES = (
    *("test_docs_formats.py", "test_every_block.py", "test_indexes.py", "test_reference_lists.py"),
    "test_site.py",
)

SLOW: set[str] = set()
"""Pages whose blocks only `make test-slow` runs."""

TEXT_ONLY = {
    ("docs/howto/move-from-orbax.md", "sh"),  # tests/orbax_face/test_scripts.py runs such a command
    ("docs/howto/watch-it.md", "json"),  # a line of a log, as the block above it writes it
}

REPLACED = {
    "README.md": {
        "s3://bucket/run": "far/run",
        'tiers="memory"': 'tiers=Disk("near")',  # no keeper is started that the test would have to end
    },
    "docs/howto/keep-steps.md": {
        "timeout_s=600": "timeout_s=0",  # nobody saves a next step
        "s3://bucket/run": "far/run",
        "/nvme/run": "near/run",
    },
}
"""What is otherwise for a test than for a reader."""

COMMANDS = {
    "README.md": (0, 0),
    "docs/howto/choose-intervals.md": (0,),
    "docs/howto/configure.md": (0, 0, 0),
    "docs/howto/convert-and-verify.md": (0, 0, 0, 0, 0, 0, 1, *[0] * 9),  # one is shown to fail
    "docs/howto/hand-a-model-to-others.md": (0,),
    "docs/install.md": (0,),
    "docs/tutorial/first-checkpoint.md": (0, 0),
}
"""Pages that show commands of `penstock`, and how each ends."""


def usual() -> dict[str, Any]:
    """Names that a reader of any page has."""
    state = {
        "params": {"embed": jnp.ones((8, 4)), "w": jnp.ones((8, 4)), "b": jnp.zeros(4)},
        "step": 7,
    }
    return {
        "Path": Path,
        "ThreadPoolExecutor": ThreadPoolExecutor,
        "jax": jax,
        "jnp": jnp,
        "key": jax.random.key(0),
        "loss": 0.5,
        "np": np,
        "opt_state": {"mu": jnp.zeros(4)},
        "params": state["params"],
        "path": "somewhere",
        "penstock": penstock,
        "state": state,
        "step": 7,
    }


async def resumed(names: dict[str, Any]) -> None:
    """README.md: the manager goes on with the run of which the first example saved a step."""
    names |= {"state": {"params": {"w": jnp.ones((1024, 1024))}, "step": 100}, "step": 200}
    names |= {"Disk": Disk}


async def mapped(names: dict[str, Any]) -> None:
    """docs/howto/restore-without-reading.md."""
    await penstock.save("ckpt/100", names["state"])


async def converted(names: dict[str, Any]) -> None:
    """docs/howto/convert-and-verify.md."""
    names["params"] = {"layers": {"0": {"w": jnp.ones(3)}}, "bias": jnp.zeros(2)}
    await penstock.export_safetensors(names["params"], "model.safetensors")
    await penstock.save("run/step_1000", names["state"])


async def trained(names: dict[str, Any]) -> None:
    """docs/howto/keep-steps.md."""
    names["steps"] = 301
    names["train"] = lambda state: (state, 0.5)
    names["evaluate"] = lambda state: state["step"]
    names["place"] = lambda key_path, value: None


async def served(names: dict[str, Any]) -> None:
    """docs/howto/serve-without-a-stall.md."""
    await penstock.save("run/latest", names["state"])


async def in_a_bucket(names: dict[str, Any]) -> None:
    """docs/howto/save-to-a-bucket.md: the bucket is in memory."""
    store = Bucket().store()
    names["penstock"] = SimpleNamespace(
        Checkpointer=partial(penstock.Checkpointer, store=store),
        export_safetensors=partial(penstock.export_safetensors, store=store),
    )


async def configured(names: dict[str, Any]) -> None:
    """Pages that read a configuration file."""
    Path("penstock.toml").write_text("[save.write]\nconcurrency = 2\n")


async def logging_imported(names: dict[str, Any]) -> None:
    """docs/howto/configure.md."""
    import logging

    names["logging"] = logging


async def own_types(names: dict[str, Any]) -> None:
    """docs/howto/store-a-type-of-your-own.md: the types of the example distribution, with JSON files."""
    file = ROOT / "docs" / "examples" / "plugin" / "src" / "penstock_example" / "__init__.py"
    module = runpy.run_path(str(file), run_name="penstock_example")

    def write_words(info: Any, words: list[str]) -> None:
        (Path(info.directory) / f"{info.name}.json").write_text(json.dumps(words))

    def read_words(info: Any) -> list[str]:
        found: list[str] = json.loads((Path(info.directory) / f"{info.name}.json").read_text())
        return found

    names |= {"Vocabulary": module["Vocabulary"], "VocabularyHandler": module["VocabularyHandler"]}
    names |= {"write_words": write_words, "read_words": read_words}


PREPARED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "README.md": resumed,
    "docs/howto/configure.md": logging_imported,
    "docs/howto/convert-and-verify.md": converted,
    "docs/howto/keep-steps.md": trained,
    "docs/howto/restore-without-reading.md": mapped,
    "docs/howto/save-to-a-bucket.md": in_a_bucket,
    "docs/howto/serve-without-a-stall.md": served,
    "docs/howto/store-a-type-of-your-own.md": own_types,
    "docs/reference/api/options.md": configured,
    "docs/reference/api/pipelines.md": configured,
}


@asynccontextmanager
async def setting(page: str) -> AsyncGenerator[dict[str, Any]]:
    """The names of one page's reader, in whose working directory the test is."""
    names = usual()
    if page in PREPARED:
        await PREPARED[page](names)

    async with penstock.Checkpointer() as checkpointer:
        yield {"checkpointer": checkpointer, **names}


def made_for_commands() -> None:
    """Make, in the working directory, the checkpoints that shown commands are given."""
    state = {"params": {"w": np.ones(8, np.float32)}, "opt": {"mu": np.zeros(8, np.float32)}}
    penstock.sync.save("weights/final", state)
    np.savez("model.npz", w=state["params"]["w"])
    np.savez_compressed("ViT-B_16.npz", **{"encoder/layer_0/kernel": state["params"]["w"]})  # type: ignore[arg-type]  # numpy's `allow_pickle` is no name here
    for root, names in (("old/run", StepNames()), ("run", StepNames()), ("other", StepNames("step"))):
        with penstock.sync.CheckpointManager(root, names=names) as manager:
            for step in (100, 1000):
                manager.save(step, state, metrics={"loss": 1.0})

    Path("other/step_1000").rename("run/step_1000")
    for name in ("Llama-2-7b", "big/Llama-2-7b"):  # a tiny one, as transformers wrote it
        shutil.copytree(Path(__file__).parents[1] / "corpus/huggingface/whole", name)
