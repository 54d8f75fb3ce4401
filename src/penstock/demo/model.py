"""A small character-level transformer with Adam, in plain JAX: something real to save."""

from __future__ import annotations

__all__ = ("SIZES", "ModelSize", "State", "count_parameters", "init_state", "train_step")

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast, final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

State: TypeAlias = dict[str, Any]
"""`{"params", "opt": {"mu", "nu", "count"}, "step", "rng"}`; `rng` is a typed PRNG key, all else arrays."""

_Params: TypeAlias = dict[str, Any]

LEARNING_RATE = np.float32(5e-4)
DECAY_MEAN = np.float32(0.9)
DECAY_SQUARE = np.float32(0.99)
EPSILON = np.float32(1e-8)
KEEP = np.float32(0.95)  # of the embeddings' elements, by dropout

_jax = cast("Any", jax)  # its signatures are partly unknown to the checkers
_jnp = cast("Any", jnp)


@final
@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers that shapes follow from, and how much one step looks at."""

    width: int
    layers: int
    heads: int
    context: int  #: characters a prediction may look back at
    batch: int  #: sequences in a step


SIZES = {
    "full": ModelSize(width=224, layers=4, heads=7, context=64, batch=2),  # 2.5 million parameters
    "small": ModelSize(width=64, layers=2, heads=4, context=32, batch=4),
}


def init_state(size: ModelSize, vocabulary: int, seed: int) -> State:
    """Return the state before the first step; equal arguments give equal bits."""
    rng = np.random.default_rng(seed)
    params = _init_params(size, vocabulary, rng)
    zeros = partial(_jax.tree.map, np.zeros_like, params)
    state = {
        "params": params,
        "opt": {"mu": zeros(), "nu": zeros(), "count": np.zeros((), np.int32)},
        "step": np.zeros((), np.int32),
    }
    return {**_jax.device_put(state), "rng": _jax.random.key(seed)}


def count_parameters(state: State) -> int:
    """Return how many numbers are trained."""
    return sum(int(leaf.size) for leaf in _jax.tree.leaves(state["params"]))


@partial(_jax.jit, static_argnames="size", donate_argnames="state")
def _train_step(state: State, tokens: Any, size: ModelSize) -> tuple[State, Any]:
    rng, dropout = _jax.random.split(state["rng"])
    loss, gradients = _jax.value_and_grad(_loss)(state["params"], dropout, tokens, size)
    params, opt = _adam(state["params"], state["opt"], gradients)
    return {"params": params, "opt": opt, "step": state["step"] + 1, "rng": rng}, loss


def train_step(state: State, tokens: npt.NDArray[np.int32], size: ModelSize) -> tuple[State, float]:
    """Take one step. Blocks until it is done, and donates `state`: its buffers are gone afterwards.

    Args:
        state: From `init_state`, an earlier step, or a checkpoint.
        tokens: `(batch, context + 1)`; each is to be predicted from those before it.
        size: As given to `init_state`.

    Returns:
        The next state and the loss of this step, a float32 in a float.
    """
    following, loss = _train_step(state, tokens, size)
    return following, float(loss)


def _init_params(size: ModelSize, vocabulary: int, rng: np.random.Generator) -> _Params:
    width = size.width

    def normal(*shape: int, scale: float) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def norm() -> _Params:
        return {"scale": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}

    def layer() -> _Params:
        thin = (width * size.layers) ** -0.5
        return {
            "norm_1": norm(),
            "qkv": normal(width, 3 * width, scale=width**-0.5),
            "out": normal(width, width, scale=thin),
            "norm_2": norm(),
            "up": normal(width, 4 * width, scale=width**-0.5),
            "down": normal(4 * width, width, scale=thin / 2),
        }

    return {
        "embed": normal(vocabulary, width, scale=0.5),
        "position": normal(size.context, width, scale=0.1),
        "layers": [layer() for _ in range(size.layers)],
        "norm": norm(),
        "head": normal(width, vocabulary, scale=0.3 * width**-0.5),
    }


def _loss(params: _Params, dropout: Any, tokens: Any, size: ModelSize) -> Any:
    x = params["embed"][tokens[:, :-1]] + params["position"]
    kept = _jax.random.bernoulli(dropout, KEEP, x.shape)
    x = _jnp.where(kept, x / KEEP, _jnp.zeros_like(x))
    for layer in params["layers"]:
        x = x + _attention(_normalise(x, layer["norm_1"]), layer, size.heads)
        x = x + _jax.nn.gelu(_normalise(x, layer["norm_2"]) @ layer["up"]) @ layer["down"]

    scores = _jax.nn.log_softmax(_normalise(x, params["norm"]) @ params["head"])
    return -_jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()


def _attention(x: Any, layer: _Params, heads: int) -> Any:
    batch, length, width = x.shape
    split = (x @ layer["qkv"]).reshape(batch, length, heads, 3 * width // heads)
    query, key, value = _jnp.split(split, 3, axis=-1)
    scores = _jnp.einsum("bqhc,bkhc->bhqk", query, key) * np.float32((width // heads) ** -0.5)
    causal = np.tril(np.ones((length, length), np.bool_))
    weights = _jax.nn.softmax(_jnp.where(causal, scores, np.float32(-1e9)))
    return _jnp.einsum("bhqk,bkhc->bqhc", weights, value).reshape(batch, length, width) @ layer["out"]


def _normalise(x: Any, norm: _Params) -> Any:
    x = x - x.mean(axis=-1, keepdims=True)
    spread = _jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-5))
    return x * spread * norm["scale"] + norm["bias"]


def _adam(params: _Params, opt: dict[str, Any], gradients: _Params) -> tuple[_Params, dict[str, Any]]:
    """Source: Kingma & Ba 2015, arXiv:1412.6980, in the form at the end of its section 2."""
    count = opt["count"] + 1
    n = count.astype(np.float32)
    one = np.float32(1)
    rate = LEARNING_RATE * _jnp.sqrt(one - DECAY_SQUARE**n) / (one - DECAY_MEAN**n)

    def mean(old: Any, gradient: Any) -> Any:
        return DECAY_MEAN * old + (one - DECAY_MEAN) * gradient

    def square(old: Any, gradient: Any) -> Any:
        return DECAY_SQUARE * old + (one - DECAY_SQUARE) * gradient * gradient

    def move(weight: Any, mu: Any, nu: Any) -> Any:
        return weight - rate * mu / (_jnp.sqrt(nu) + EPSILON)

    mu = _jax.tree.map(mean, opt["mu"], gradients)
    nu = _jax.tree.map(square, opt["nu"], gradients)
    return _jax.tree.map(move, params, mu, nu), {"mu": mu, "nu": nu, "count": count}
