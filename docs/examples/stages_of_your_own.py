"""Three stages: one counts and hashes, one quantises, one encrypts. None knows how bytes travel."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import penstock
from penstock.kernel import LeafSpec, OpaquePiece, Piece, PlannedBatch, StagedBatch, decoded
from penstock.pipelines import restore_pipeline, save_pipeline


@dataclass
class CountAndHash:
    """Looks at every byte on its way, and changes none."""

    nbytes: int = 0
    digests: dict[Any, str] = field(default_factory=dict[Any, str])

    def __call__(self, batch: StagedBatch) -> StagedBatch:
        for piece in batch.parts():
            self.nbytes += piece.nbytes
            self.digests[piece.name, piece.chunk, piece.start] = sha256(piece.data).hexdigest()
        return batch


class Quantise:
    """Stores float32 as bfloat16. Restoring with `dtype=` makes float32 of it again."""

    def resolve_spec(self, spec: LeafSpec) -> LeafSpec:
        return replace(spec, dtype="bfloat16", itemsize=2) if spec.dtype == "float32" else spec

    def __call__(self, batch: StagedBatch) -> StagedBatch:
        return batch.map(self.quantised, self.resolve_spec)

    def quantised(self, piece: Piece) -> Any:
        if piece.leaf.spec.dtype != "float32":
            return piece.data
        return np.frombuffer(piece.data, "<f4").astype(ml_dtypes.bfloat16).view(np.uint8)


CODEC = "example.aes_gcm"


def about(piece: Piece | OpaquePiece) -> bytes:
    """Which bytes these are, so that none can take the place of others."""
    return f"{piece.name} {piece.chunk} {piece.start}".encode()


@dataclass(frozen=True)
class Encrypt:
    """Seals every chunk under a fresh nonce."""

    key: bytes = field(repr=False)

    def resolve_spec(self, spec: LeafSpec) -> LeafSpec:
        return replace(spec, codec=CODEC)

    def __call__(self, batch: StagedBatch) -> StagedBatch:
        return batch.map(self.sealed, self.resolve_spec)

    def sealed(self, piece: Piece) -> bytes:
        nonce = os.urandom(12)
        return bytes(nonce + AESGCM(self.key).encrypt(nonce, piece.data, about(piece)))


@dataclass(frozen=True)
class Decrypt:
    """Opens what `Encrypt` sealed with the same key."""

    key: bytes = field(repr=False)

    def __call__(self, batch: PlannedBatch) -> PlannedBatch:
        return decoded(batch, CODEC, self.opened)

    def opened(self, piece: OpaquePiece) -> bytes:
        return bytes(AESGCM(self.key).decrypt(piece.data[:12], piece.data[12:], about(piece)))


async def save_and_restore(directory: Path, state: Mapping[str, Any]) -> None:
    """Save a state in three ways, and restore it from each."""
    plain, way_in = save_pipeline(), restore_pipeline()
    async with penstock.Checkpointer() as checkpointer:
        counter = CountAndHash()
        pipeline = plain.insert_after("device_to_host", counter)
        report = await (await checkpointer.save(directory / "counted", state, pipeline=pipeline))
        assert counter.nbytes == report.nbytes

        pipeline = plain.insert_after("device_to_host", Quantise())
        await (await checkpointer.save(directory / "quantised", state, pipeline=pipeline))
        assert (await checkpointer.restore(directory / "quantised"))["w"].dtype == jnp.bfloat16
        back = await checkpointer.restore(directory / "quantised", dtype=jnp.float32)
        assert back["w"].dtype == jnp.float32

        key = AESGCM.generate_key(256)
        pipeline = plain.insert_after("device_to_host", Encrypt(key))
        await (await checkpointer.save(directory / "sealed", state, pipeline=pipeline))
        opening = way_in.insert_after("plan", Decrypt(key))
        back = await checkpointer.restore(directory / "sealed", pipeline=opening)
        assert jnp.array_equal(back["w"], state["w"])


def main(directory: Path) -> None:
    """Run it."""
    anyio.run(save_and_restore, directory, {"w": jnp.arange(1000) / 8, "step": 7})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
