"""Write the bundled SmolLM2 as an HF-style folder, as its makers publish it: bf16 safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenspeed.loader.gguf import GgufFile
from tokenspeed.text.gguf import read_gguf
from tokenspeed.text.gguf_tokenizer import build_tokenizer
from tokenspeed.text.source import resolve_model
from tokenspeed.text.tokenizer import load_tokenizer


def write_smollm2_folder(
    folder: Path, *, dtype: torch.dtype = torch.bfloat16, num_shards: int = 1
) -> Path:
    """Fill `folder` with weights rounded to `dtype`, config, tokenizer and chat template."""
    source = resolve_model("smollm2")
    folder.mkdir(parents=True, exist_ok=True)
    stored = GgufFile(source.path)
    tensors = {name: stored.read(name).to(dtype) for name in stored.shapes}
    write_weights(folder, tensors, num_shards)
    tokenizer = load_tokenizer(source)
    build_tokenizer(read_gguf(source.path)).save(str(folder / "tokenizer.json"))
    config = {**source.config, "torch_dtype": str(dtype).removeprefix("torch.")}
    template = {"chat_template": tokenizer.chat_template, **tokenizer.special_tokens}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", source.generation_config)
    write_json(folder / "tokenizer_config.json", template)
    return folder


def write_weights(folder: Path, tensors: dict[str, Tensor], num_shards: int = 1) -> None:
    """One model.safetensors, or `num_shards` files with their index."""
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = list(tensors), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False))
