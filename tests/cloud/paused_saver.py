"""Saves at a path again and again, and stops before a chosen request of each save: for `test_paused_savers`.

    python -m tests.cloud.paused_saver URL

Reads the number of a request from its input, and saves at `URL/<number>`. Before that request it stops itself
with SIGSTOP. Then it says how the save ended, in one line: `saved`, or the name of the error. 0 ends it.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import penstock
from penstock.handlers.stores.buckets import ObjectClient
from penstock.handlers.stores.publishing import ProcessIdentity

CHANGING = ("put", "create", "swap", "copy", "delete")


class Counter:
    """Counts the requests that change something, and stops before one of them."""

    def __init__(self) -> None:
        self.n = self.stop_at = 0

    def watch(self, name: str) -> None:
        method: Callable[..., Any] = getattr(ObjectClient, name)

        def call(client: ObjectClient, *arguments: Any) -> Any:
            self.n += 1
            if self.n == self.stop_at:
                # To this thread: another may take one for the process, and this one goes on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

            return method(client, *arguments)

        setattr(ObjectClient, name, call)


def on_another_machine(mine: ProcessIdentity) -> ProcessIdentity:
    """So that nobody can see that this process lives."""
    return dataclasses.replace(mine, boot="another", machine="another", namespace="another")


def main() -> None:
    counter = Counter()
    for name in CHANGING:
        counter.watch(name)

    mine = on_another_machine(ProcessIdentity.mine())
    ProcessIdentity.mine = classmethod(lambda _: mine)  # type: ignore[assignment,method-assign]
    with penstock.sync.Checkpointer() as checkpointer:
        for line in sys.stdin:
            number = int(line)
            if not number:
                break

            counter.n, counter.stop_at = 0, number
            try:
                tree = {"who": "paused", "a": np.zeros(1000), "b": np.zeros(1000)}
                checkpointer.save(f"{sys.argv[1]}/{number}", tree).result()
            except penstock.PenstockError as error:
                said = type(error).__name__
            else:
                said = "saved"

            sys.stdout.write(f"{said} {counter.n}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
