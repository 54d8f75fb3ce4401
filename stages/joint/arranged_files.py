"""Files whose layout says in advance where each leaf is, written by several processes at once.

All processes arrange the same leaves alike, so each knows where its own parts go. The primary makes the files
before the others hear where, and writes what they begin with when all have written.
"""

from __future__ import annotations

__all__ = ("check_arranged", "complete_files", "make_files")

from collections.abc import Container
from contextlib import closing
from typing import Final

from penstock.kernel.errors import InvalidLeafError, SpecError, UnsupportedByStoreError
from penstock.kernel.messages.joint_plan import ArrangedPart
from penstock.kernel.messages.save import SavePlan
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.stores import SharedFiles

_ALONE: Final = "each such file is one object there: save or convert in one process, or to Orbax's layout"


def check_arranged(run: SaveRun, plan: SavePlan, own: Container[int]) -> None:
    """Refuse what several processes cannot write into one file.

    Raises:
        InvalidLeafError: If each process has a leaf for itself: the others do not know where it would be.
        SpecError: If there is a base.
        UnsupportedByStoreError: If a file of the store is written by one process alone.
    """
    if run.store.shared_files is None:
        raise UnsupportedByStoreError("write together", run.path, run.store, SharedFiles, _ALONE)
    if run.base is not None:
        raise SpecError(f"a {type(run.layout).__name__} has no files that could be linked: leave out `base`")

    alone = next((at for at in range(len(plan.infos)) if at in own), None)
    if alone is not None:
        problem = "each process has it for itself, and where all lies in such a file must be known to all"
        raise InvalidLeafError(plan.infos[alone].key_path, problem)


def make_files(run: SaveRun, plan: SavePlan) -> None:
    """Make all files of the arrangement, of their full length. Blocking; the primary's.

    With its full length, no process that writes past the end that it sees of a file fills it up with zeros.
    """
    places = run.layout.places
    if places is None:
        return

    arrangement = places.arrange(run.path, plan.infos, plan.specs, run.custom_metadata)
    ends = {head.path: len(head.data) for head in arrangement.heads}
    for place, spec in zip(arrangement.places, plan.specs, strict=True):
        if place is not None:
            ends[place.file] = max(ends[place.file], place.offset + spec.nbytes)

    for name, end in ends.items():
        with closing(run.store.create_data_file(run.workspace.path(name))) as file:
            file.allocate(end)
            file.write_at(end - 1, [memoryview(b"\0")])


def complete_files(run: SaveRun, part: ArrangedPart) -> None:
    """Write the heads of files, and the documents next to them, durably. Blocking; for the primary.

    Args:
        run: Of the save.
        part: With the checksums of what all processes wrote.
    """
    files = run.store.shared_files
    assert files is not None, "the plan says so"
    for head in part.arrangement.heads:
        with closing(files.open_for_writing(run.workspace.path(head.path))) as file:
            file.write_at(0, [memoryview(part.digests.head(head.path))])
            file.sync()

    for document in part.arrangement.documents:
        run.store.write_file(run.workspace.path(document.path), document.data)
