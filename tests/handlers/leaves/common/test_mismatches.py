"""Where a target and a stored array disagree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tests.handlers.leaves.round_trips import P, Saved, difference, mesh, save, struct, target

from penstock.errors import UnsupportedFormatError
from penstock.handlers import ArrayHandler, StringHandler
from penstock.kernel import LeafSpec

HANDLER = ArrayHandler()


@pytest.mark.parametrize(
    ("like", "kind", "words"),
    [
        (jnp.zeros((16, 8)), "shape", "float32[16,8] in the target, jax.Array float32[8,16] on disk"),
        (
            jnp.zeros((8, 16), jnp.bfloat16),
            "dtype",
            "bfloat16[8,16] in the target, jax.Array float32[8,16] on",
        ),
        (struct((8, 16), np.float64), "dtype", "float64[8,16] in the target"),
        (jax.random.key(0), "dtype", "key<fry>[] in the target"),
        (
            struct((8, 16), np.float32, sharding=NamedSharding(mesh(3), P("x"))),
            "sharding",
            "cannot divide",
        ),
        (3.0, "type", "float in the target"),
    ],
    ids=["shape", "dtype", "struct", "key", "indivisible", "float"],
)
def test_a_difference_is_told_and_nothing_is_cast(like: object, kind: str, words: str) -> None:
    found = difference(HANDLER, save(HANDLER, jnp.zeros((8, 16))), like)
    assert found.kind == kind
    assert words in str(found)


def test_a_string_is_no_array() -> None:
    found = difference(HANDLER, save(StringHandler(), "x"), jnp.zeros(()))
    assert (found.kind, found.in_like, found.on_disk) == ("type", "jax.Array", "string")


def test_an_unknown_dtype_or_key_implementation_is_unsupported() -> None:
    unknown = Saved(LeafSpec("jax.Array", (1,), "int3", 1, (1,)), {})
    with pytest.raises(UnsupportedFormatError, match=r"/ckpt: no dtype 'int3'.*\(leaf \['opt'\]\.mu\)"):
        target(HANDLER, unknown)
    keys = Saved(LeafSpec("jax.Array", (2,), "uint32", 4, (2,), extended_dtype="dice"), {})
    with pytest.raises(UnsupportedFormatError, match="PRNG implementation 'dice'"):
        target(HANDLER, keys)
