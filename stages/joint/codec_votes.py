"""Decides which leaves with the codec `auto` get one, where several processes write parts of a leaf.

A leaf has one codec, so all of its parts must be encoded, or none. Each process looks at a sample of what it
writes, and votes, before anything is written; the primary counts, and tells the others. The votes travel with
what the processes say of their plans anyway: this costs no call.
"""

from __future__ import annotations

__all__ = ("NO_VOTE", "counted", "take_votes", "undecided", "with_codecs")

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.kernel.codecs import AUTO
from penstock.kernel.errors import CoordinationError
from penstock.kernel.messages.changed_specs import CodecChoice
from penstock.kernel.messages.save import Leaf, Leaves, SavePlan
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.stages.joint.own_leaves import places_of_own
from penstock.stages.messages.batching import grouped

NO_VOTE: Final = 0  # this process writes nothing of the leaf
MUST_BE_PLAIN: Final = 1  # what it links of the leaf is stored plainly
PLAIN: Final = 2
FIRST: Final = 3  # this number, and those after it, are for the codecs among which the stage chooses

SAMPLED_BYTES: Final = 2**20
"""A vote is about so many bytes at most, the first that this process writes of a leaf: they are read before
the caller's state may change."""


def undecided(plan: SavePlan) -> Sequence[int]:
    """Return the places of leaves whose codec all processes must choose together. Pure.

    There are as many of them everywhere, in the same order. What a process has for itself it decides alone.
    """
    own = places_of_own(plan.infos)
    return [at for at, spec in enumerate(plan.specs) if spec.codec == AUTO and at not in own]


async def take_votes(
    run: SaveRun, choice: CodecChoice, places: Sequence[int], leaves: Leaves, plan: SavePlan
) -> bytes:
    """Return this process's vote on each undecided leaf.

    What must be copied to the host for that is leased, up to one piece at a time.

    Args:
        run: Of the save.
        choice: Says what is worth it.
        places: What `undecided` returned.
        leaves: Those of which this process writes anything.
        plan: With what it links in `kept`.
    """
    assert run.layout.arrays is not None, "others have no codecs"
    wanted = frozenset(places)
    votes = dict.fromkeys(places, NO_VOTE)
    if plan.kept is not None:
        linked = [leaf.index for leaf in plan.kept.leaves if leaf.index in wanted]
        votes.update(dict.fromkeys(linked, MUST_BE_PLAIN))

    most = min(run.limits.piece_bytes, SAMPLED_BYTES)
    asked = [leaf for leaf in leaves if leaf.index in wanted and leaf.spec.nbytes]
    for group in grouped(asked, run.limits.piece_bytes):
        nbytes = max([min(most, leaf.spec.nbytes) for leaf in group])  # one after another
        lease = await run.lease(nbytes, group[0].info.key_path, prioritised=False)
        try:
            votes.update(await run.threads.run(_votes, group, most, choice, run.layout.arrays.encode))
        finally:
            lease.release()

    return bytes([votes[at] for at in places])


def _votes(
    leaves: Sequence[Leaf],
    most: int,
    choice: CodecChoice,
    encode: Callable[[str, Sequence[memoryview], int], Sequence[bytes]],
) -> dict[int, int]:
    found: dict[int, int] = {}
    for leaf in leaves:
        first = next(iter(leaf.handler.pieces(leaf, most)))
        codec = choice.choose(first.take(), leaf.spec.itemsize, encode)
        found[leaf.index] = PLAIN if codec is None else FIRST + list(choice.auto_codecs).index(codec)

    return found


def counted(ballots: Iterable[bytes]) -> bytes:
    """Return for each undecided leaf the number of its codec, counted from 1, and 0 for none. Pure.

    It gets one if that is worth it for more of those who write it than it is not: the one that most of them
    want, of equals the first.

    Args:
        ballots: The votes of each process.

    Raises:
        CoordinationError: If they are not about the same leaves.
    """
    ballots = list(ballots)
    if len({len(ballot) for ballot in ballots}) > 1:
        raise CoordinationError("they vote about other codecs: do all processes run one penstock?")

    votes = np.frombuffer(b"".join(ballots), np.uint8).reshape(len(ballots), -1)
    by_codec = np.array([(votes == FIRST + number).sum(0) for number in range(int(votes.max(initial=0)) + 1)])
    is_encoded = (by_codec.sum(0) > (votes == PLAIN).sum(0)) & ~(votes == MUST_BE_PLAIN).any(0)
    decided: npt.NDArray[np.uint8] = np.where(is_encoded, by_codec.argmax(0) + 1, 0).astype(np.uint8)
    return decided.tobytes()


def with_codecs(plan: SavePlan, places: Sequence[int], decided: bytes, codecs: Sequence[str]) -> SavePlan:
    """Return the plan with the chosen codecs. Specs that are one object stay one object. Pure.

    Args:
        plan: With undecided leaves.
        places: Theirs.
        decided: What `counted` returned.
        codecs: Those that were voted on.

    Raises:
        CoordinationError: If it was decided about other leaves.
    """
    if len(decided) != len(places):
        raise CoordinationError("the primary decided about other codecs: do all processes run one penstock?")

    specs, known = list(plan.specs), dict[tuple[int, int], LeafSpec]()
    for at, number in zip(places, decided, strict=True):
        key = id(specs[at]), number
        if key not in known:
            known[key] = replace(specs[at], codec=codecs[number - 1] if number else None)

        specs[at] = known[key]

    return replace(plan, specs=specs)
