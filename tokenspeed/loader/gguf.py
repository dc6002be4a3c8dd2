"""Weights from a GGUF file: read one by one, dequantised by the `gguf` package or kept in blocks,
named as in HF.

Shapes and bounds were checked with the metadata (`text.gguf`); the package's own reader takes
seconds for a vocabulary and is not used. Converters store the q and k rows of `llama` models with
the two rotary halves of each head interleaved; they are put back. Qwen's are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenspeed.loader.names import rename
from tokenspeed.text.errors import ModelError
from tokenspeed.text.gguf import TensorInfo, read_gguf

HF_MODULES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_CONFIG_TENSORS = frozenset({"rope_freqs.weight"})
"""Read as part of the config (`text.gguf_config`), not as a weight."""


class GgufFile:
    """All tensors of a GGUF file by their HF names, in the order in which they are stored. Those
    named in `formats` are read as blocks of that format.
    """

    def __init__(self, path: Path, formats: Mapping[str, str] | None = None) -> None:
        file = read_gguf(path)
        self._path = path
        self._formats = formats or {}
        self._infos = {
            rename(name, HF_MODULES): info
            for name, info in file.tensors.items()
            if name not in _CONFIG_TENSORS
        }
        self._dequantise = _load_dequantise()
        self._interleaved_heads: dict[str, int] = {}
        if file.text("general.architecture") == "llama":
            num_heads = file.integer("llama.attention.head_count")
            num_kv_heads = file.integer("llama.attention.head_count_kv", num_heads)
            self._interleaved_heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
        self.shapes = {name: info.shape for name, info in self._infos.items()}

    def num_bytes(self, name: str) -> int:
        return self._infos[name].num_bytes

    def read(self, name: str) -> Tensor:
        """Float32, row-major; or the bytes of each row, uint8 [rows, bytes]."""
        info = self._infos[name]
        raw = np.fromfile(self._path, np.uint8, info.num_bytes, offset=info.start)
        if raw.nbytes != info.num_bytes:
            raise ModelError(f"{self._path}: became shorter while tensor {info.name} was read")
        rows = raw.reshape(*info.shape[:-1], -1)
        tensor = torch.from_numpy(rows if name in self._formats else self._floats(info, rows))
        if self._formats.get(name, info.type) != info.type:
            raise ModelError(f"{self._path}: was replaced while it was read; start again")
        heads = self._interleaved_heads.get(name.split(".")[-2])
        return halves_apart(tensor, heads) if heads else tensor

    def _floats(self, info: TensorInfo, rows: Any) -> Any:
        try:
            return self._dequantise(rows, info.type)
        except (NotImplementedError, KeyError):
            raise ModelError(
                f"{self._path}: tensor {info.name} has type {info.type}, which the gguf package "
                "cannot dequantise"
            ) from None


def halves_apart(rows: Tensor, num_heads: int) -> Tensor:
    """Rows (0, D/2, 1, D/2 + 1, ...) of each head [num_heads * D, ...] -> rows (0, 1, 2, ...)."""
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _load_dequantise() -> Any:
    """The optional package's function: (bytes [..., row bytes], type name) -> float32."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise ModelError(
            "reading GGUF weights needs the gguf package: pip install 'tokenspeed[gguf]'"
        ) from None
    return lambda data, kind: quants.dequantize(data, GGMLQuantizationType[kind])
