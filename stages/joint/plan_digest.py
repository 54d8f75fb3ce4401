"""A digest of what must be the same in all processes that save together, and differences in words."""

from __future__ import annotations

__all__ = ("described_plan", "digest_of_plan")

import hashlib
from collections.abc import Iterable, Mapping

from penstock.kernel.messages.save import SavePlan
from penstock.kernel.protocols.leaf import KeyPath, LeafSpec
from penstock.stages.joint.own_leaves import keys_of_node, places_of_own

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
    """Return where each process has a value of its own."""
    return sorted({keys_of_node(plan.infos[at]) for at in own})


def _described(spec: LeafSpec) -> str:
    """Describe a spec as far as it must be the same: where a leaf that is held whole lies, need not."""
    if spec.shape is None:
        return spec.typestr if spec.text is None else f"{spec.typestr} {spec.text!r}"

    parts = [spec.typestr, f"{spec.dtype}{list(spec.shape)}"]
    if spec.chunk_shape != spec.shape:
        parts.append(f"in chunks of {list(spec.chunk_shape)}")
    if spec.write_shape not in (None, spec.chunk_shape):
        parts.append(f"written in {list(spec.write_shape or ())}")

    parts += [what for what in (spec.codec, spec.random_key_impl) if what]
    if spec.is_global:
        parts.append(f"over {spec.n_replicas} replicas of {spec.sharding}")

    return " ".join(parts)
