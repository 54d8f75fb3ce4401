"""Proves the recipes: `make recipes-proof`.

For each family a tiny model of transformers gets random weights and is saved by `save_pretrained`. The recipe
converts that folder, the model of jax gets what comes out, and both compute the same outputs. The way back
gives the folder byte for byte, in one file and in several.

It needs torch, tunix and the last transformers with models in jax, which the suite does not:
`make recipes-proof` puts them into an environment for this alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

import penstock
from penstock.rules import RECIPES, load_recipe

LENGTH: Final = 7
VOCABULARY: Final = 11
HEAD: Final = 128
"""Numbers in a head of Qwen's models."""


@final
@dataclass(frozen=True)
class Family:
    """One model in both libraries."""

    config: Any
    of_torch: str  #: the name of a class of transformers
    inputs: Callable[[], Mapping[str, Any]]
    in_jax: Callable[[Family, Path], Any]  #: its outputs of converted weights


def _tokens() -> dict[str, Any]:
    return {"input_ids": np.arange(2 * LENGTH).reshape(2, LENGTH) * 5 % VOCABULARY}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)}


def _sound() -> dict[str, Any]:
    features = np.random.default_rng(0).standard_normal((2, 4, 16)).astype(np.float32)
    return {"input_features": features, "decoder_input_ids": _tokens()["input_ids"]}


def _in_flax(family: Family, weights: Path) -> Any:
    """Return the logits of the model of transformers 4 in jax."""
    model = getattr(transformers, f"Flax{family.of_torch}")(family.config)
    params = penstock.sync.restore(weights, like=model.params)
    return model(**family.inputs(), params=params).logits


def _in_tunix(family: Family, weights: Path) -> Any:
    """Return the logits of the model of tunix, whose package imports trainers that need much else."""
    if "tunix" not in sys.modules:
        spec = find_spec("tunix")
        assert spec is not None, "tunix is not installed"
        package = sys.modules["tunix"] = ModuleType("tunix")
        package.__path__ = list(spec.submodule_search_locations or ())

    config = family.config
    is_third = "3" in config.model_type
    model = import_module(f"tunix.models.{'qwen3' if is_third else 'qwen2'}.model")
    experts = ("num_experts", "num_experts_per_tok") if is_third else ()
    described = model.ModelConfig(
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=getattr(config, "moe_intermediate_size", config.intermediate_size),
        num_heads=config.num_attention_heads,
        head_dim=HEAD,
        num_kv_heads=config.num_key_value_heads,
        rope_theta=config.rope_theta,
        norm_eps=config.rms_norm_eps,
        use_tied_embedding=config.tie_word_embeddings,
        **{name: getattr(config, name, None) for name in experts},
    )
    made = (model.Qwen3 if is_third else model.Qwen2)(described, rngs=nnx.Rngs(0))
    state = nnx.state(made)
    nnx.replace_by_pure_dict(state, penstock.sync.restore(weights, like=nnx.to_pure_dict(state)))
    nnx.update(made, state)
    tokens = jnp.asarray(family.inputs()["input_ids"])
    n = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(n), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (len(tokens), n, n))
    return made(tokens, positions, None, mask)[0]


_DECODER: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 11,  # so that layer 10 is there, which sorts before layer 2 as a text
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_ENCODER: Final = {
    "hidden_size": 8,
    "num_hidden_layers": 11,
    "num_attention_heads": 2,
    "intermediate_size": 6,
}
_WHISPER: Final = {
    "vocab_size": VOCABULARY, "d_model": 8, "encoder_layers": 11, "decoder_layers": 11, "num_mel_bins": 4,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 6, "decoder_ffn_dim": 6,
    "max_source_positions": 8, "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip


def families() -> dict[str, Family]:
    """Return the family of each recipe."""
    of = transformers
    heads = {"head_dim": HEAD, "rope_theta": 1_000_000.0}
    experts = {
        "num_experts": 11,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
    }
    return {
        "llama": Family(of.LlamaConfig(**_DECODER), "LlamaForCausalLM", _tokens, _in_flax),
        "mistral": Family(
            of.MistralConfig(**_DECODER, sliding_window=32), "MistralForCausalLM", _tokens, _in_flax
        ),
        "gemma": Family(
            of.GemmaConfig(**_DECODER, head_dim=4, hidden_activation="gelu_pytorch_tanh"),
            "GemmaForCausalLM",
            _tokens,
            _in_flax,
        ),
        "gpt2": Family(
            of.GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=11, n_head=2, n_positions=16),
            "GPT2LMHeadModel",
            _tokens,
            _in_flax,
        ),
        "bert": Family(
            of.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **_ENCODER),
            "BertForMaskedLM",
            _tokens,
            _in_flax,
        ),
        "qwen2": Family(
            of.Qwen2Config(**{**_DECODER, "hidden_size": 4 * HEAD}, rope_theta=1_000_000.0),
            "Qwen2ForCausalLM",
            _tokens,
            _in_tunix,
        ),
        "qwen3": Family(
            of.Qwen3Config(**_DECODER, **heads, tie_word_embeddings=True),
            "Qwen3ForCausalLM",
            _tokens,
            _in_tunix,
        ),
        "qwen3_moe": Family(
            of.Qwen3MoeConfig(**_DECODER, **heads, **experts), "Qwen3MoeForCausalLM", _tokens, _in_tunix
        ),
        "vit": Family(
            of.ViTConfig(image_size=8, patch_size=4, **_ENCODER),
            "ViTForImageClassification",
            _pixels,
            _in_flax,
        ),
        "whisper": Family(of.WhisperConfig(**_WHISPER), "WhisperForConditionalGeneration", _sound, _in_flax),
    }


def prove(recipe: str, family: Family, folder: Path, shard: str) -> float:
    """Convert there and back, compare everything, and return the largest difference of an output.

    Raises:
        AssertionError: If anything differs.
    """
    torch.manual_seed(0)
    model = getattr(transformers, family.of_torch)(family.config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also what begins as ones and zeros, so that no two are alike
            parameter.add_(torch.randn_like(parameter) * 0.1)

    model.save_pretrained(folder / "there", max_shard_size=shard)
    rules = load_recipe(recipe)
    penstock.sync.convert(folder / "there", folder / "orbax", rules=rules)
    penstock.sync.convert(
        folder / "orbax", folder / "back", rules=rules.inverse(), format="huggingface", max_shard_bytes=shard
    )
    there, back = (
        {path.name: path.read_bytes() for path in (folder / name).iterdir()} for name in ("there", "back")
    )
    assert there.keys() == back.keys(), sorted(there.keys() ^ back.keys())
    for name, data in there.items():
        assert data == back[name], f"{name} differs on the way back"

    inputs = family.inputs()
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits.numpy()

    found = np.asarray(family.in_jax(family, folder / "orbax"))
    difference = float(np.abs(found - expected).max())
    assert difference <= 2e-5 * max(1.0, float(np.abs(expected).max())), f"an output differs by {difference}"
    assert float(np.abs(expected).std()) > 1e-3, "the outputs say nothing"
    return difference


def main() -> int:
    """Prove all recipes, or those named; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="a family")
    only = parser.parse_args().only
    failed = 0
    proven = set[str]()
    for name, family in families().items():
        if only and name not in only:
            continue

        for shard in ("50GB", "3KB"):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    difference = prove(name, family, Path(folder), shard)
                except Exception as error:
                    failed += 1
                    sys.stdout.write(f"{name:8} {shard:>5}  FAILED: {error!r}"[:2000] + "\n")
                    continue

                n_files = len([*(Path(folder) / "there").glob("*.safetensors")])
                line = f"{name:8} {n_files:3} files: outputs within {difference:.1e}, back byte for byte"
                sys.stdout.write(f"{line}\n")
                proven.add(name)

    unproven = sorted(RECIPES - proven)
    if unproven and not only:
        failed += 1
        sys.stdout.write(f"no family proves {', '.join(unproven)}\n")

    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
