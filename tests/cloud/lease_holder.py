"""A manager that saves on a machine of its own, until it is killed or stopped: for `test_leases`.

    python -m tests.cloud.lease_holder FACE ROOT

Opens `penstock.CheckpointManager` or that of `penstock.orbax`, saves step 1, and says `opened`. Then it does
what its input says, and answers in one line: `save STEP`, `hang STEP` (the save stops before its mark, and
says `hangs`), `delete STEP`, `close`. An error is answered by its name.
"""

from __future__ import annotations

import dataclasses
import sys
from importlib import import_module
from threading import Event
from typing import Any

import numpy as np

import penstock
from penstock.handlers.stores.buckets import ObjectClient
from penstock.handlers.stores.publishing import ProcessIdentity


def on_another_machine(mine: ProcessIdentity) -> ProcessIdentity:
    """So that nobody can see that this process lives, or has ended."""
    return dataclasses.replace(mine, boot="another", machine="another", namespace="another")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def state(step: int) -> dict[str, Any]:
    return {"a": np.full(1000, float(step)), "step": step}


def stop_before_the_mark() -> None:
    """Have the next mark wait for ever."""
    create: Any = ObjectClient.create

    def call(client: ObjectClient, key: str, data: bytes) -> Any:
        if key.endswith("commit_success.txt") and "/default/" not in key:  # an item has one of its own
            say("hangs")
            Event().wait()
        return create(client, key, data)

    setattr(ObjectClient, create.__name__, call)


def main() -> None:
    face, root = sys.argv[1:]
    mine = on_another_machine(ProcessIdentity.mine())
    ProcessIdentity.mine = classmethod(lambda _: mine)  # type: ignore[assignment,method-assign]
    manager = opened(face, root)
    manager.save(1)
    say("opened")
    for line in sys.stdin:
        what, _, step = line.strip().partition(" ")
        if what == "close":
            break
        if what == "hang":
            stop_before_the_mark()
        try:
            manager.save(int(step)) if what in ("save", "hang") else manager.delete(int(step))
        except (penstock.PenstockError, OSError) as error:
            say(type(error).__name__)
        else:
            say("done")

    manager.close()


def opened(face: str, root: str) -> Any:
    """Return a manager of either face, with `save(step)`, `delete(step)`, `steps()` and `close()`."""
    return _Penstock(root) if face == "penstock" else _Orbax(root)


class _Penstock:
    def __init__(self, root: str) -> None:
        self._manager = penstock.sync.CheckpointManager(root).__enter__()
        self.steps = self._manager.all_steps
        self.delete = self._manager.delete

    def save(self, step: int) -> None:
        future: Any = self._manager.save(step, state(step))
        future.result()

    def close(self) -> None:
        self._manager.__exit__(None, None, None)


class _Orbax:
    def __init__(self, root: str) -> None:
        orbax: Any = import_module("penstock.orbax")
        self._args, self._manager = orbax.args, orbax.CheckpointManager(root)
        self.steps, self.delete = self._manager.all_steps, self._manager.delete
        self.close = self._manager.close

    def save(self, step: int) -> None:
        self._manager.save(step, args=self._args.StandardSave(state(step)))
        self._manager.wait_until_finished()


if __name__ == "__main__":
    main()
