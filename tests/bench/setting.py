"""The state, the folder and the caches of one workload: what each operation begins from and works on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, final

from tests.bench import caches, trees
from tests.bench.contenders.protocol import Contender
from tests.bench.results import Operation
from tests.bench.trees import State


@final
class Setting:
    """Brings everything to the point where an operation begins, and carries it out."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state = state
        self._folder = folder
        self._targets: dict[Operation, State] = {}

    def prepare(self, contender: Contender, operation: Operation) -> bool:
        """Bring disk and caches to where the operation begins. Blocking.

        Returns:
            Whether that worked: some file systems cannot drop what is cached.
        """
        path = self.place(contender, operation)
        prepared = True
        if not operation.reads:
            shutil.rmtree(path, ignore_errors=True)
        elif operation.cold:
            caches.settle()  # pages that are dirty stay
            prepared = caches.drop(path)
        else:
            caches.warm(path)

        self.target(operation)
        caches.settle()
        return prepared

    async def perform(self, contender: Contender, operation: Operation) -> Any:
        """Carry out the operation, and nothing else."""
        path = self.place(contender, operation)
        if operation is Operation.METADATA:
            return await contender.metadata(path)
        if operation is Operation.SECOND_SAVE:
            base = self.place(contender, Operation.SAVE)
            return await contender.save(path, self.target(operation), base)
        if not operation.reads:
            return await contender.save(path, self.state)

        return await contender.restore(path, self.target(operation))

    def finish(self, contender: Contender, operation: Operation) -> None:
        """Leave no pages in the cache: the kernel would have to find room among them for the next one's."""
        os.sync()
        caches.forget(self.place(contender, operation))

    async def warm_up(self, contender: Contender) -> None:
        """Have it save once: two leaves, or, for penstock, the tree that it is to know."""
        path = self._folder / "warm-up"
        few = State(dict(zip("ab", self.state.leaves[:2], strict=False)))
        try:
            await contender.save(path, self.state if contender.label == "penstock" else few)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def target(self, operation: Operation) -> State:
        """What the operation saves or restores into; made once."""
        if operation not in self._targets:
            if operation in {Operation.RESTORE_NUMPY, Operation.COLD_NUMPY}:
                made = trees.into_numpy(self.state)
            elif operation is Operation.RESHARD:
                made = trees.onto_four(self.state)
            elif operation is Operation.SECOND_SAVE:
                made = trees.changed(self.state)
            elif operation is Operation.RESTORE_JAX:
                made = trees.into_jax(self.state)
            else:
                made = self.state

            self._targets[operation] = made

        return self._targets[operation]

    def place(self, contender: Contender, operation: Operation) -> Path:
        """Where the checkpoint lies that the operation writes or reads."""
        label = contender.checkpoint.replace(", ", "-").replace(" ", "-")
        second = "-second" if operation is Operation.SECOND_SAVE else ""
        return self._folder / f"{label}{second}"


def bytes_not_shared(path: Path, earlier: Path | None) -> int:
    """Bytes in the files of a checkpoint, but for those that are files of an earlier one, too."""
    shared = {(s.st_dev, s.st_ino) for s in map(Path.stat, caches.files_of(earlier))} if earlier else set()
    found = [name.stat() for name in caches.files_of(path)]
    return sum(status.st_size for status in found if (status.st_dev, status.st_ino) not in shared)


def io_bytes() -> int | None:
    """Bytes that this process has caused to be written to storage; None where that is not counted."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None

    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes")), None)
