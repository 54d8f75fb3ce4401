"""Encodes the chunks of leaves that have a codec, and decides which `auto` leaves get one."""

from __future__ import annotations

__all__ = ("Encode",)

import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, final

from anyio import Lock

from penstock.kernel.codecs import AUTO, check_codec
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.memory.byte_account import ByteLease, releasing
from penstock.kernel.messages.save import Extents, Leaf, Piece, SavePlan, StagedBatch
from penstock.kernel.options import fit_fields
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.pipeline.together import together
from penstock.stages.messages.batching import encoding_room

# 256 KiB of a chunk of 16 MiB: to encode the sample takes 1.6 % of the time for the chunk.
SAMPLES: Final = 8
SAMPLE_BYTES: Final = 32 * 1024
HARDLY_MORE: Final = 0.875
"""A slower codec has to leave less than this part of what a faster one leaves: it takes twice the time."""


@final
@dataclass(frozen=True, slots=True)
class Encode:
    """Takes `StagedBatch`es and yields them with their chunks encoded. Leaves without a codec pass.

    Whether a leaf whose codec is `auto` gets one is decided by a sample of its first chunk to arrive, unless
    the plan says it already, as it does where several processes save together. From then on its spec names
    the codec. The lease of a piece shrinks to the encoded length.

    What came without a lease, since its bytes are those of the caller, gets one for what is made of it. It
    does not wait for that while others may come that hold one: they could hold the whole budget. So it is put
    aside where there is no room at once, and encoded after the last message.

    Attributes:
        concurrency: Batches encoded at once, each by a thread.
        auto_codecs: The codecs for leaves that compress well. A leaf gets the one that leaves least of its
            sample, and an earlier one if that leaves hardly more: they stand in the order of their speed.
        auto_saves: The fraction of its bytes that this must save at least.
    """

    messages: ClassVar[Messages] = {StagedBatch: StagedBatch}
    advice: ClassVar[Advice] = Advice(
        'Choose a faster `[format] codec` (`"floats"`, or `"none"`), or more workers: '
        "`[save.encode] concurrency`.",
    )

    concurrency: int = field(default_factory=lambda: min(8, os.cpu_count() or 1), metadata={"positive": True})
    # Where exponents cross a power of two, the second finds a tenth more than the first, at half its speed.
    # It and the third are for what repeats.
    auto_codecs: tuple[str, ...] = ("floats", "blosc:zstd:1:bitshuffle:1048576", "zstd:1")
    auto_saves: float = 0.05

    def __post_init__(self) -> None:
        fit_fields(self, "encode")
        if not self.auto_codecs:
            raise ConfigError("encode.auto_codecs", "must name one codec at least")

        found = tuple([check_codec("encode.auto_codecs", codec) for codec in self.auto_codecs])
        object.__setattr__(self, "auto_codecs", found)
        if not 0 <= self.auto_saves < 1:
            raise ConfigError("encode.auto_saves", f"must be between 0 and 1, not {self.auto_saves!r}")

    def choose(
        self,
        data: memoryview,
        itemsize: int,
        encode: Callable[[str, Sequence[memoryview], int], Sequence[bytes]],
        /,
    ) -> str | None:
        """Return the codec that is best for a sample of `data`; None if none saves enough. Blocking."""
        sample = _sample(data, itemsize)
        best, least = None, (1 - self.auto_saves) * len(sample)
        for codec in self.auto_codecs:
            (encoded,) = encode(codec, [sample], itemsize)
            if len(encoded) <= (least if best is None else HARDLY_MORE * least):
                best, least = codec, len(encoded)

        return best

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        yield _Encoder(run, self) if run.layout.arrays is not None else _pass_on


def _coded(batch: StagedBatch) -> list[int]:
    """Return the places of extents with a codec; leaves that share a buffer have none."""
    return [at for at, extents in enumerate(batch.extents) if extents.specs[0].codec]


async def _pass_on(batch: StagedBatch, /) -> StagedBatch:
    return batch


@final
class _Encoder:
    __slots__ = ("_aside", "_decided", "_deciding", "_encode", "_options", "_run")

    def __init__(self, run: SaveRun, options: Encode) -> None:
        assert run.layout.arrays is not None
        self._run = run
        self._aside: deque[StagedBatch] = deque()  # for which there was no room
        self._encode = run.layout.arrays.encode
        self._options = options
        self._decided: dict[int, Leaf] = {}  # of leaves that were `auto`, by index
        self._deciding = Lock()

    async def __call__(self, batch: StagedBatch, /) -> StagedBatch | None:
        places = _coded(batch)
        if not places:
            return self._with_leaves(batch)

        for at in places:
            await self._decide(next(iter(batch.extents[at])), batch.plan)

        if batch.staged is None:
            lease = self._run.memory.acquire_nowait(self._room(batch), flow=self._run.flow)
            if lease is None:
                self._aside.append(batch)
                return None

            with releasing(lease):
                return await self._made_of(batch, lease)

        return await self._made_of(batch, batch.staged)

    async def finish(self) -> AsyncIterator[StagedBatch]:
        """Encode what was put aside, as much at once as there are workers and as there is room for."""
        run = self._run
        while self._aside:
            with ExitStack() as leases:
                first = self._aside.popleft()
                key_path = first.extents[0].leaves[0].info.key_path
                lease = await run.lease(self._room(first), key_path, prioritised=False)
                chosen = [(first, leases.enter_context(releasing(lease)))]
                while self._aside and len(chosen) < self._options.concurrency:
                    more = run.memory.acquire_nowait(self._room(self._aside[0]), flow=run.flow)
                    if more is None:
                        break

                    chosen.append((self._aside.popleft(), leases.enter_context(releasing(more))))

                made = deque(await together([partial(self._made_of, *one) for one in chosen]))

            try:
                while made:
                    yield made.popleft()
            finally:
                for batch in made:
                    batch.release()

    def _room(self, batch: StagedBatch) -> int:
        """Bytes to lease for what is made of a batch that came without a lease."""
        pieces = [next(iter(batch.extents[at])) for at in _coded(batch)]
        coded = [piece for piece in pieces if self._leaf_of(piece).spec.codec is not None]
        return sum([encoding_room(piece.nbytes) for piece in coded])

    def _leaf_of(self, piece: Piece) -> Leaf:
        return self._decided.get(piece.leaf.index, piece.leaf)

    async def _made_of(self, batch: StagedBatch, lease: ByteLease) -> StagedBatch:
        """Encode a batch whose codecs are decided, and shrink the lease."""
        places = _coded(batch)
        pieces = [next(iter(batch.extents[at])) for at in places]
        leaves = list(map(self._leaf_of, pieces))
        if batch.staged is None:
            costs = [
                0 if leaf.spec.codec is None else encoding_room(leaf.spec.chunk_nbytes) for leaf in leaves
            ]
            pieces = [replace(piece, cost=cost) for piece, cost in zip(pieces, costs, strict=True)]
            batch = replace(batch, staged=lease)

        encoded = await self._run.threads.run(_encoded, self._encode, pieces, leaves)
        over = sum([piece.cost for piece in pieces]) - sum([piece.cost for piece in encoded])
        if over > 0:
            lease.split(over).release()

        extents = list(batch.extents)
        for at, piece in zip(places, encoded, strict=True):
            extents[at] = Extents.of(piece)

        return replace(self._with_leaves(batch), extents=tuple(extents))

    async def _decide(self, piece: Piece, plan: SavePlan | None) -> None:
        """Decide the codec of an `auto` leaf once, although several workers may hold its chunks."""
        leaf = piece.leaf
        if leaf.spec.codec != AUTO or leaf.index in self._decided:
            return

        async with self._deciding:
            if leaf.index in self._decided:
                return

            codec = AUTO if plan is None else plan.specs[leaf.index].codec
            if codec == AUTO:
                itemsize = leaf.spec.itemsize
                codec = await self._run.threads.run(self._options.choose, piece.data, itemsize, self._encode)

            self._decided[leaf.index] = replace(leaf, spec=replace(leaf.spec, codec=codec))

    def _with_leaves(self, batch: StagedBatch) -> StagedBatch:
        """Replace the leaves by those with a decided codec."""
        if not self._decided or not any(leaf.spec.codec == AUTO for leaf in batch.leaves):
            return batch

        return replace(batch, leaves=tuple([self._decided.get(leaf.index, leaf) for leaf in batch.leaves]))


def _sample(data: memoryview, itemsize: int) -> memoryview:
    """A few evenly spread parts of the data, of whole elements; all of it if it is no larger."""
    if len(data) <= SAMPLES * SAMPLE_BYTES:
        return data

    step = (len(data) - SAMPLE_BYTES) // (SAMPLES - 1)
    step -= step % itemsize
    return memoryview(b"".join([data[at * step : at * step + SAMPLE_BYTES] for at in range(SAMPLES)]))


def _encoded(
    encode: Callable[[str, Sequence[memoryview], int], Sequence[bytes]],
    pieces: Sequence[Piece],
    leaves: Sequence[Leaf],
) -> tuple[Piece, ...]:
    """Encode the pieces, in a worker thread; `leaves` have their codecs decided."""
    alike: dict[tuple[str, int], list[int]] = {}  # by codec, and by bytes of an element
    found: list[Piece] = []
    for at, (piece, leaf) in enumerate(zip(pieces, leaves, strict=True)):
        found.append(piece)
        if piece.leaf.spec.codec is None:
            continue
        if piece.start or piece.nbytes != leaf.spec.chunk_nbytes:
            error = PenstockError(f"{leaf.info.key_path}: a piece to be encoded is not a whole chunk")
            error.key_path = leaf.info.key_path
            raise error

        if leaf.spec.codec is None:  # it is stored as it is, so the lease for its output is not needed
            found[at] = replace(piece, leaf=leaf, cost=max(0, piece.cost - encoding_room(piece.nbytes)))
        else:
            alike.setdefault((leaf.spec.codec, leaf.spec.itemsize), []).append(at)

    for (codec, itemsize), places in alike.items():
        made = encode(codec, [pieces[at].data for at in places], itemsize)
        for at, data in zip(places, made, strict=True):
            found[at] = Piece(
                leaves[at], pieces[at].chunk, 0, memoryview(data), cost=len(data), coded=len(data)
            )

    return tuple(found)
