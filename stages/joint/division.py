"""Divides leaves among processes evenly, and checks that all were asked the same: by digest, and in words."""

from __future__ import annotations

__all__ = (
    "balanced",
    "check_active",
    "described_plan",
    "digest_of_plan",
    "divided",
    "local_disk_specs",
)

import hashlib
import heapq
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.kernel.errors import InvalidLeafError, PathError, SpecError
from penstock.kernel.messages.changed_specs import CodecChoice
from penstock.kernel.messages.joint_plan import Ballot, JointPlan
from penstock.kernel.messages.save import Leaves, SavePlan
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.leaf import KeyPath, LeafSpec
from penstock.kernel.protocols.leaf_handlers import EveryProcess, FilesHandler, GlobalHandler
from penstock.stages.joint.arranged_files import check_arranged
from penstock.stages.joint.base_links import find_links
from penstock.stages.joint.codec_votes import take_votes, undecided
from penstock.stages.joint.own_leaves import keys_of_node, places_of_own
from penstock.stages.reuse.base_comparison import take_digests


async def divided(
    run: SaveRun, leaves: Leaves, plan: SavePlan, choice: CodecChoice | None
) -> tuple[Leaves, SavePlan]:
    """Return the leaves of which this process writes anything, and the plan with a `JointPlan`.

    Of a global array each process writes its part; on its own disk, all that it holds. A leaf that every
    process holds whole is written by the primary, or by each on its own disk; its bytes must be the same
    everywhere, so all of them are read for a digest, but for those that only its own handler knows. What
    each process has for itself, it writes, and none of that need be the same.

    Raises:
        SpecError: If the layout cannot be written by several processes, or a leaf cannot.
    """
    operation, own = run.operation, places_of_own(plan.infos)
    if run.layout.places is not None:
        if operation.is_local:
            problem = "is on a disk of this process alone, and this format has no parts; choose another"
            raise PathError(run.path, problem)

        check_arranged(run, plan, own)
    elif run.layout.arrays is None:
        raise SpecError(f"a {type(run.layout).__name__} cannot be written by several processes together")

    places = undecided(plan)
    if places and choice is None:
        problem = "has the codec 'auto', and no stage of this pipeline decides about it"
        raise InvalidLeafError(plan.infos[places[0]].key_path, problem)

    writes_whole = operation.publishes
    shares = await run.threads.run(_shares, leaves, own, writes_whole)
    handled = _handled(leaves, own, writes_whole)
    held_whole = leaves.part(
        [at for at, spec in enumerate(leaves.specs) if not spec.replicas.is_global and at not in own]
    )
    found = await take_digests(run, held_whole)
    options = {**options_of(run), "auto_codecs": list(choice.auto_codecs) if places and choice else None}
    digest = await run.threads.run(digest_of_plan, plan, found, options)
    joint = JointPlan(
        shares=_scaled(shares, leaves, plan),
        digest=digest,
        held_whole=found,
        options=options,
        handled=handled,
    )
    kept = leaves.part([at for at, share in enumerate(shares) if share or at in handled])
    plan = replace(plan, joint=joint)
    if run.request.by_digest:
        plan = replace(plan, digests=await take_digests(run, kept))
    if run.base is not None:
        kept, plan = await find_links(run, kept, plan)
    if places and choice is not None:
        votes = await take_votes(run, choice, places, kept, plan)
        ballot = Ballot(places=places, votes=votes, codecs=choice.auto_codecs)
        plan = replace(plan, joint=replace(plan.joint or joint, ballot=ballot))

    return kept, plan


def options_of(run: SaveRun) -> Mapping[str, object]:
    """Return what else must be the same in all processes. Paths on local disks need not be."""
    layout, operation = run.layout, run.operation
    base: object = None
    if not (run.base is None or run.request.base_if_whole):  # what is linked if it is there is no one's wish
        base = True if operation.is_local else run.base

    return {
        "path": operation.path,
        "format": type(layout).__name__ if layout.arrays is None else layout.arrays.save_format,
        "custom_metadata": run.custom_metadata,
        "base": base,
        "compare": run.request.compare,
    }


def _handled(leaves: Leaves, own: Container[int], writes_whole: bool) -> frozenset[int]:
    """Return the leaves that handlers of this process write into files of their own.

    Of what all processes hold, the primary's handler writes it, on local disks that of each process, unless
    the handler says that each process writes a part of it.
    """
    return frozenset(
        [
            number
            for number, handler in enumerate(leaves.handlers)
            if isinstance(handler, FilesHandler)
            and (writes_whole or number in own or _writes_everywhere(handler))
        ]
    )


def _writes_everywhere(handler: object) -> bool:
    return isinstance(handler, EveryProcess) and handler.every_process


def _shares(leaves: Leaves, own: Container[int], writes_whole: bool) -> list[int]:
    """Return how many bytes of each leaf this process writes.

    Args:
        leaves: With their values.
        own: The places of those that this process has for itself.
        writes_whole: Whether it writes those that every process holds whole.
    """
    shares: list[int] = []
    assert leaves.values is not None
    for number, (spec, handler) in enumerate(zip(leaves.specs, leaves.handlers, strict=True)):
        if number in own and spec.replicas.is_global:
            raise InvalidLeafError(
                leaves.infos[leaves.indices[number]].key_path,
                "the array has shards on other processes, and a PerProcess is what one process holds whole",
            )
        if spec.replicas.is_global and isinstance(handler, GlobalHandler):
            shares.append(handler.nbytes_here(leaves.values[number], spec))
        else:
            shares.append(spec.nbytes if writes_whole or number in own else 0)

    return shares


def _scaled(shares: Sequence[int], leaves: Leaves, plan: SavePlan) -> list[int]:
    """Return the same in bytes as they leave the last stage that changes a leaf."""
    if not plan.changes:
        return list(shares)

    rows = zip(shares, leaves.specs, plan.specs, strict=True)
    return [share * after.nbytes // spec.nbytes if share else 0 for share, spec, after in rows]


SHOWN = 6
"""Bytes of a digest that are shown."""


def digest_of_plan(plan: SavePlan, digests: Mapping[str, bytes], options: Mapping[str, object]) -> bytes:
    """Return a digest of every leaf's place and spec, and of the bytes of those held whole.

    Args:
        plan: Of the save.
        digests: Of the bytes of leaves that each process holds whole, by stored name.
        options: What else must be the same.
    """
    texts = {number: _described(spec) for number, spec in {id(spec): spec for spec in plan.specs}.items()}
    whole = hashlib.sha256(repr(sorted(options.items())).encode("utf-8", "surrogatepass"))
    own = places_of_own(plan.infos)
    whole.update(repr(_nodes(plan, own)).encode("utf-8", "surrogatepass"))
    for at, (info, spec) in enumerate(zip(plan.infos, plan.specs, strict=True)):
        if at in own:
            continue

        row = (info.keys, [kind.name for kind in info.kinds], texts[id(spec)], digests.get(info.name))
        whole.update(repr(row).encode("utf-8", "surrogatepass"))

    return whole.digest()


def described_plan(plan: SavePlan, digests: Mapping[str, bytes], options: Mapping[str, object]) -> list[str]:
    """Return the same as lines: a key path, or the name of an option, a tab, and what it is."""
    lines = [f"option {name}\t{value!r}" for name, value in sorted(options.items())]
    own = places_of_own(plan.infos)
    lines += [f"{'.'.join(keys) or 'the tree'}\ta PerProcess" for keys in _nodes(plan, own)]
    for at, (info, spec) in enumerate(zip(plan.infos, plan.specs, strict=True)):
        if at in own:
            continue

        digest = digests.get(info.name)
        held = "" if digest is None else f" with the SHA-256 {digest[:SHOWN].hex()}…"
        lines.append(f"{info.key_path or 'the tree'}\t{_described(spec)}{held}")

    return lines


def _nodes(plan: SavePlan, own: Iterable[int]) -> list[KeyPath]:
    """Return where each process has its own value."""
    return sorted({keys_of_node(plan.infos[at]) for at in own})


def _described(spec: LeafSpec) -> str:
    """Describe a spec as far as it must be the same: where a leaf that is held whole is, need not."""
    if spec.shape is None:
        return spec.typestr if spec.text is None else f"{spec.typestr} {spec.text!r}"

    parts = [spec.typestr, f"{spec.dtype}{list(spec.shape)}"]
    if spec.chunk_shape != spec.shape:
        parts.append(f"in chunks of {list(spec.chunk_shape)}")
    if spec.write_shape not in (None, spec.chunk_shape):
        parts.append(f"written in {list(spec.write_shape or ())}")

    parts += [what for what in (spec.codec, spec.extended_dtype) if what]
    if spec.replicas.is_global:
        parts.append(f"over {spec.replicas.n} replicas of {spec.sharding}")

    return " ".join(parts)


def check_active(leaves: Leaves, active: Sequence[int]) -> None:
    """Refuse an array that has shards on processes that take no part: they would not be written.

    Args:
        leaves: With their values.
        active: The processes that take part.

    Raises:
        InvalidLeafError: For the first such leaf.
    """
    assert leaves.values is not None
    for number, (spec, handler) in enumerate(zip(leaves.specs, leaves.handlers, strict=True)):
        if not spec.replicas.is_global or not isinstance(handler, GlobalHandler):
            continue

        others = [index for index in handler.processes_of(leaves.values[number]) if index not in active]
        if others:
            raise InvalidLeafError(
                leaves.infos[leaves.indices[number]].key_path,
                f"the array has shards on process {', '.join(map(str, sorted(others)))}, "
                f"and only {', '.join(map(str, active))} take part (job.active_processes)",
            )


def balanced(specs: Sequence[LeafSpec]) -> Sequence[LeafSpec]:
    """Return the specs with the replica that writes each array which only one replica writes.

    Each process makes the same choice: the largest arrays come first, each to the replica that has least so
    far. Of equals, one far from those before: neighbouring replicas are mostly of one process. Arrays with
    different numbers of replicas are balanced apart.
    """
    chosen = list(specs)
    alike: dict[tuple[int, int], LeafSpec] = {}
    least: dict[int, list[tuple[int, int, int]]] = {}
    shared = [
        at
        for at, spec in enumerate(specs)
        if spec.replicas.is_global and spec.replicas.n > 1 and spec.replicas.n_writers == 1 and spec.nbytes
    ]
    for at in sorted(shared, key=lambda at: (-_shard_bytes(specs[at]), at)):
        spec = specs[at]
        heap = least.setdefault(spec.replicas.n, [])
        if not heap:
            heap.extend((0, rank, writer) for rank, writer in enumerate(_far_apart(spec.replicas.n)))

        nbytes, rank, writer = heap[0]
        heapq.heapreplace(heap, (nbytes + _shard_bytes(spec), rank, writer))
        key = id(spec), writer
        if key not in alike:
            alike[key] = replace(spec, replicas=replace(spec.replicas, writer=writer))

        chosen[at] = alike[key]

    return chosen


def local_disk_specs(specs: Sequence[LeafSpec]) -> Sequence[LeafSpec]:
    """Return the specs for local disks: each process writes all that it holds, also what others hold."""
    known = {id(spec): spec for spec in specs}
    alike = {
        number: replace(spec, replicas=replace(spec.replicas, writer=None)) for number, spec in known.items()
    }
    return [alike[id(spec)] if spec.replicas.is_global else spec for spec in specs]


def _shard_bytes(spec: LeafSpec) -> int:
    return spec.nbytes if spec.write_shape is None else math.prod(spec.write_shape) * spec.itemsize


def _far_apart(count: int) -> list[int]:
    """Return the numbers below `count`, each far from those before it: bits in reverse order."""
    bits = (count - 1).bit_length()
    return sorted(range(count), key=lambda number: int(f"{number:0{bits or 1}b}"[::-1], 2))
