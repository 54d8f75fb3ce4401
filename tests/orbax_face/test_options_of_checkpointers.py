"""What options of checkpointers do, on both libraries."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orbax.checkpoint as _orbax
import pytest
from tests.orbax_face.shown_options import Cases, Shown, refused, values

import penstock.orbax as _penstock

ours: Any = _penstock
theirs: Any = _orbax  # it has no types
CASES = Cases()
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")


class Documents:
    """A store of documents that counts its writes."""

    def __init__(self, inner: Any, *, blocking: bool) -> None:
        self.inner, self.blocking, self.names = inner, blocking, set[str]()

    def is_blocking_writer(self) -> bool:
        return self.blocking

    def write(self, file_path: Any, metadata: Any) -> None:
        self.names.add(os.path.basename(file_path))
        self.inner.write(file_path, metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@CASES.shows(
    "Checkpointer.checkpoint_metadata_store",
    "AsyncCheckpointer.checkpoint_metadata_store",
    "StandardCheckpointer.checkpoint_metadata_store",
    "metadata.MetadataStore.blocking_write",
)
def stores_of_metadata(ocp: Any, root: Path) -> Any:
    def store(blocking: bool) -> Any:
        return Documents(
            ocp.metadata.metadata_store(enable_write=True, blocking_write=True), blocking=blocking
        )

    found: list[Any] = []
    for n, (kind, blocking) in enumerate(
        (
            (lambda **o: ocp.Checkpointer(ocp.StandardCheckpointHandler(), **o), True),
            (lambda **o: ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), **o), False),
            (ocp.StandardCheckpointer, False),
        )
    ):
        mine = store(blocking)
        with kind(checkpoint_metadata_store=mine) as checkpointer:
            checkpointer.save(root / str(n), {"a": np.ones(2)})
        found.append(sorted(mine.names))
    refusal = refused(
        ocp.Checkpointer, ocp.StandardCheckpointHandler(), checkpoint_metadata_store=store(False)
    )
    writer = ocp.metadata.metadata_store(enable_write=True, blocking_write=False)
    return found, refusal, writer.is_blocking_writer()


@CASES.shows(
    "AsyncCheckpointer.file_options",
    "AsyncCheckpointer.atomicity_options",
    "StandardCheckpointer.file_options",
    "StandardCheckpointer.atomicity_options",
    "StandardCheckpointer.async_options",
    "StandardCheckpointer.multiprocessing_options",
    "AsyncCheckpointer.multiprocessing_options",
    "options.AtomicityOptions.allow_legacy_atomic_rename",
    "AsyncOptions.timeout_secs",
)
def checkpointers_in_the_background(ocp: Any, root: Path) -> Any:
    finished: list[str] = []
    mode = ocp.options.AtomicityMode
    options = {
        "file_options": ocp.options.FileOptions(path_permission_mode=0o750),
        "atomicity_options": ocp.options.AtomicityOptions(mode.COMMIT_FILE, allow_legacy_atomic_rename=False),
        "async_options": ocp.AsyncOptions(
            timeout_secs=60, post_finalization_callback=lambda: finished.append("done")
        ),
        "multiprocessing_options": ocp.options.MultiprocessingOptions(primary_host=0),
    }
    found: list[Any] = []
    makers: list[Any] = [
        lambda: ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), **options),
        lambda: ocp.StandardCheckpointer(**options),
    ]
    for n, make in enumerate(makers):
        path = root / str(n)
        with make() as checkpointer:
            checkpointer.save(path, {"a": np.ones(2)}) if n else checkpointer.save(
                path, args=ocp.args.StandardSave({"a": np.ones(2)})
            )
            checkpointer.wait_until_finished()
            (path / "commit_success.txt").unlink()
            unmarked = refused(checkpointer.restore, path)
        lenient = ocp.options.AtomicityOptions(mode.COMMIT_FILE, allow_legacy_atomic_rename=True)
        with ocp.Checkpointer(ocp.StandardCheckpointHandler(), atomicity_options=lenient) as reader:
            restored = values(reader.restore(path))
        found.append((oct(path.stat().st_mode & 0o777), unmarked, restored))
    return found, finished


@CASES.shows(
    "CompositeCheckpointHandler.composite_options",
    "CompositeOptions.file_options",
    "CompositeOptions.atomicity_options",
    "CompositeOptions.async_options",
    "CompositeOptions.multiprocessing_options",
)
def options_of_several_items(ocp: Any, root: Path) -> Any:
    options = ocp.CompositeOptions(
        multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=0),
        file_options=ocp.options.FileOptions(path_permission_mode=0o750),
        atomicity_options=ocp.options.AtomicityOptions(ocp.options.AtomicityMode.ATOMIC_RENAME),
        async_options=ocp.AsyncOptions(timeout_secs=60),
    )
    handler = ocp.CompositeCheckpointHandler("a", composite_options=options)
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        checkpointer.save(root / "one", args=ocp.args.Composite(a=ocp.args.JsonSave({"x": 1})))
        checkpointer.wait_until_finished()
        return oct((root / "one" / "a").stat().st_mode & 0o777), checkpointer.restore(root / "one")["a"]


@CASES.shows(
    "future.CommitFutureAwaitingContractedSignals.name",
    "future.CommitFutureAwaitingContractedSignals.send_signals",
    "future.CommitFutureAwaitingContractedSignals.timeout_secs",
    "future.CommitFutureAwaitingContractedSignals.operation_id",
)
def futures_of_coroutines(ocp: Any, root: Path) -> Any:
    async def write() -> None:
        (root / threading.current_thread().name.partition("-")[0]).touch()

    options = {"send_signals": [], "timeout_secs": 5, "operation_id": "7"}
    ocp.future.CommitFutureAwaitingContractedSignals(write(), name="mine", **options).result()
    return sorted(path.name for path in root.iterdir())


@CASES.shows(
    "utils.broadcast_one_to_all.is_source",
    "utils.sync_global_devices.timeout",
    "utils.sync_global_devices.processes",
    "utils.sync_global_devices.barrier_sync_fn",
    "v1.multihost.sync_global_processes.timeout",
    "v1.multihost.sync_global_processes.processes",
)
def one_process_waits_for_nobody(ocp: Any, root: Path) -> Any:
    del root
    called: list[Any] = []
    ocp.utils.sync_global_devices("a", timeout=1, processes={0}, barrier_sync_fn=called.append)
    options = {"operation_id": "c", "timeout": 1, "processes": {0}}
    anyio.run(partial(ocp.v1.multihost.sync_global_processes, "b", **options))
    return called, values(ocp.utils.broadcast_one_to_all(np.arange(3), is_source=True))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_permissions_are_less_what_the_umask_takes_away(umask: int, tmp_path: Path) -> None:
    def modes(ocp: Any, mode: int) -> list[str]:
        files = ocp.options.FileOptions(path_permission_mode=mode)
        root = tmp_path / f"{ocp.__name__}-{mode}"
        with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(file_options=files)) as manager:
            manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave({"a": np.ones(2)})))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), file_options=files) as checkpointer:
            checkpointer.save(root / "one", {"a": np.ones(2)})

        with ocp.v1.Context(file_options=ocp.v1.options.FileOptions(path_permission_mode=mode)):
            ocp.v1.save(root / "v1", {"a": np.ones(2)})
        places = (root, root / "0", root / "0" / "state", root / "one", root / "v1")
        return [oct(place.stat().st_mode & 0o777) for place in places]

    before = os.umask(umask)
    try:
        for mode in (0o777, 0o750, 0o700):
            assert modes(ours, mode) == modes(theirs, mode) == [oct(mode & ~umask)] * 5
    finally:
        os.umask(before)


@pytest.mark.parametrize("shown", CASES, ids=lambda shown: shown.case.__name__)
def test_options_do_what_they_do_in_orbax(tmp_path: Path, shown: Shown) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()

    assert shown.case(ours, tmp_path / "ours") == shown.case(theirs, tmp_path / "theirs")
