"""Which handler each leaf goes to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from tests.handlers.leaves.round_trips import INFO, struct

from penstock.errors import InvalidLeafError, NoHandlerError
from penstock.handlers import default_handlers

HANDLERS = default_handlers(entry_points=False)


@pytest.mark.parametrize(
    ("value", "typestr"),
    [
        (jnp.zeros(3), "jax.Array"),
        (jax.random.key(0), "jax.Array"),
        (np.zeros(3), "np.ndarray"),
        (np.ma.masked_array([1]), "np.ndarray"),
        (3, "scalar"),
        (True, "scalar"),
        (2.5, "scalar"),
        (1j, "scalar"),
        (np.float64(1), "scalar"),
        (np.bool_(1), "scalar"),
        (ml_dtypes.bfloat16(1), "scalar"),
        ("x", "string"),
        (np.str_("x"), "string"),
        (None, "None"),
        ({}, "Dict"),
        ([], "List"),
        ((), "Tuple"),
        (optax.EmptyState(), "Tuple"),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_each_leaf_finds_its_handler(value: object, typestr: str) -> None:
    assert HANDLERS.lookup(type(value), INFO.key_path).typestr == typestr


@pytest.mark.parametrize(
    "typestr",
    ["jax.Array", "np.ndarray", "scalar", "string", "None", "Dict", "List", "Tuple", "NamedTuple"],
)
def test_each_stored_type_finds_its_handler(typestr: str) -> None:
    handler = HANDLERS.for_typestr(typestr, INFO.key_path)
    assert handler.typestr == typestr


def test_an_abstract_or_traced_leaf_is_told_what_is_wrong() -> None:
    def describe(value: object) -> object:
        handler = HANDLERS.lookup(type(value), INFO.key_path)
        return handler.describe([value], [INFO], {})

    with pytest.raises(InvalidLeafError, match="abstract"):
        describe(struct((2,), np.float32))
    with pytest.raises(InvalidLeafError, match="tracer"):
        jax.eval_shape(describe, jnp.zeros(2))


def test_types_that_are_not_supported_have_no_handler() -> None:
    for value in (b"x", {1}, object()):
        with pytest.raises(NoHandlerError, match="Register one"):
            HANDLERS.lookup(type(value), INFO.key_path)


def test_each_call_returns_a_registry_of_its_own() -> None:
    assert default_handlers() is not default_handlers()
