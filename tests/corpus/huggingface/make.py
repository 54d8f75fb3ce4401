"""Writes the folders here, with torch and transformers 5.24: `python make.py`, anywhere that has both.

`whole` and `sharded` are one tiny Llama as `save_pretrained` writes it, and `order.json` has the names of its
state dict in order. `every_dtype.safetensors` is what safetensors 0.8 writes of each element type.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
sys.dont_write_bytecode = True
os.environ["HF_HUB_OFFLINE"] = "1"

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    dtype="bfloat16",
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
for name, size in (("whole", "50GB"), ("sharded", "0.5KB")):
    shutil.rmtree(HERE / name, ignore_errors=True)
    model.save_pretrained(HERE / name, max_shard_size=size)
    for file in (HERE / name).iterdir():
        file.chmod(0o644)

(HERE / "order.json").write_text(json.dumps(list(model.state_dict())) + "\n")

DTYPES = (
    "bool uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz int16 uint16 "
    "float16 bfloat16 int32 uint32 float32 complex64 float64 int64 uint64"
)
arrays = {
    f"x.{name}": torch.arange(48, dtype=torch.uint8).view(getattr(torch, name)) if name != "bool" else None
    for name in DTYPES.split()
}
arrays["x.bool"] = torch.tensor([True, False, True])
arrays['é"\\\x01\x7f'] = torch.zeros((), dtype=torch.float32)
arrays["a.empty"] = torch.zeros((0, 3))
arrays["a.empty.half"] = torch.zeros((2, 0), dtype=torch.float16)
save_file(arrays, HERE / "every_dtype.safetensors", metadata={"format": "pt"})
