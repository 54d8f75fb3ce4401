"""The same script on both libraries: the callback of ArrayHandler, and saves that take too long."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import orbax.checkpoint
import pytest
from jax.tree_util import DictKey
from orbax.checkpoint._src.serialization import limits
from orbax.checkpoint._src.serialization.types import TransferPriority

import penstock.orbax

both = pytest.mark.parametrize("ocp", [penstock.orbax, orbax.checkpoint], ids=["penstock", "orbax"])


class Callback:
    """Notes what it is told."""

    def __init__(self, **priorities: TransferPriority) -> None:
        self.priorities = priorities
        self.heard: list[tuple[str, str]] = []

    def key_priority(self, keypath: Any) -> TransferPriority:
        self.heard.append(("priority", keypath[0].key))
        return self.priorities[keypath[0].key]

    def on_transfer_end(self, keypath: Any) -> None:
        self.heard.append(("transferred", keypath[0].key))

    def on_write_end(self, keypath: Any) -> None:
        self.heard.append(("written", keypath[0].key))


def _infos(ocp: Any, directory: Path, names: str) -> list[Any]:
    directory.mkdir()
    return [
        ocp.type_handlers.ParamInfo(
            name=name,
            parent_dir=directory,
            keypath=(DictKey(name),),
            is_ocdbt_checkpoint=False,
            device_host_byte_limiter=limits.LimitInFlightBytes(1 << 20),
            ts_context=ocp.type_handlers.get_ts_context(use_ocdbt=False),
        )
        for name in names
    ]


@both
async def test_a_callback_orders_copies_and_hears_of_each(tmp_path: Path, ocp: Any) -> None:
    later, first = TransferPriority.ASYNCHRONOUS_DEPRIORITIZED, TransferPriority.SYNCHRONOUS
    callback = Callback(a=later, b=first)
    handler = ocp.type_handlers.ArrayHandler(callback=callback, use_replica_parallel=False)

    for future in await handler.serialize([jnp.ones(2), jnp.ones(2)], _infos(ocp, tmp_path / "here", "ab")):
        future.result()

    assert callback.heard[:2] == [("priority", "a"), ("priority", "b")]
    copied = [key for event, key in callback.heard if event == "transferred"]
    assert copied == ["b", "a"]
    assert sorted(callback.heard[2:]) == sorted((e, k) for e in ("transferred", "written") for k in "ab")


@both
async def test_an_unknown_priority_is_refused(tmp_path: Path, ocp: Any) -> None:
    callback = Callback(a=TransferPriority.UNKNOWN)
    handler = ocp.type_handlers.ArrayHandler(callback=callback, use_replica_parallel=False)

    with pytest.raises(ValueError, match="Prioritization is unknown"):
        await handler.serialize([jnp.ones(2)], _infos(ocp, tmp_path / "here", "a"))


def test_a_save_that_takes_too_long_fails_on_time_and_is_removed_later(tmp_path: Path) -> None:
    go_on = threading.Event()

    class Slow(penstock.orbax.AsyncCheckpointHandler):
        async def async_save(self, directory: Any, args: Any = None, **kwargs: Any) -> Any:
            (directory / "part").write_text("half")
            return [penstock.orbax.future.CommitFutureAwaitingContractedSignals(self._write())]

        async def _write(self) -> None:
            go_on.wait()

        def save(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

        def restore(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

    checkpointer = penstock.orbax.AsyncCheckpointer(Slow(), timeout_secs=1)
    begun = time.monotonic()
    checkpointer.save(tmp_path / "slow", 1)
    with pytest.raises(TimeoutError):
        checkpointer.wait_until_finished()

    assert time.monotonic() - begun < 20
    go_on.set()
    checkpointer.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_handler_does_at_the_end_counts_for_the_timeout(tmp_path: Path) -> None:
    finalized: list[str] = []

    class Late(penstock.orbax.AsyncCheckpointHandler):
        async def async_save(self, directory: Any, args: Any = None, **kwargs: Any) -> None:
            (directory / "part").write_text("all")

        def save(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

        def restore(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

        def finalize(self, directory: Any) -> None:
            finalized.append(directory.name)

    checkpointer = penstock.orbax.AsyncCheckpointer(Late(), timeout_secs=cast("int", 1e-9))
    checkpointer.save(tmp_path / "late", 1)
    with pytest.raises(TimeoutError, match="Timed out after 1e-09 seconds"):
        checkpointer.wait_until_finished()

    checkpointer.close()
    assert len(finalized) == 1
    assert list(tmp_path.iterdir()) == []
