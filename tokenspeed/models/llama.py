"""Llama: pre-norm decoder with grouped-query attention, rotary positions and SwiGLU (arXiv
2302.13971, 2407.21783).
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tokenspeed.kernels.attend import attend
from tokenspeed.kv.specs import CacheSpec, FullAttention
from tokenspeed.models.family import Family, Weights
from tokenspeed.models.fields import Fields
from tokenspeed.models.layers import MergedLinear, RMSNorm, RotaryEmbedding, rotate
from tokenspeed.models.rope import Rope, resolve_rope


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    rope: Rope
    max_model_len: int

    @classmethod
    def from_dict(cls, hf: Mapping[str, Any], max_model_len: int | None = None) -> LlamaConfig:
        fields = Fields(hf)
        fields.require("hidden_act", "silu")
        sizes = fields.sizes()
        rope, max_model_len = resolve_rope(fields, sizes["head_dim"], max_model_len)
        return cls(
            **sizes,
            norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            tied=fields.flag("tie_word_embeddings", False),
            rope=rope,
            max_model_len=max_model_len,
        )


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        bias = config.attention_bias
        self.qkv_proj = MergedLinear(config.hidden_size, [q_size, kv_size, kv_size], bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(x))
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, self.layer)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedLinear(hidden, [inner, inner], bias)
        self.down_proj = nn.Linear(inner, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return h + self.mlp(self.post_attention_layernorm(h))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.rope)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def fill_buffers(self) -> None:
        self.rotary_emb.fill()

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary_emb(positions)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def head(self, rows: Tensor) -> Tensor:
        return self.lm_head(rows)


WEIGHTS: Weights = {
    "model.embed_tokens": ("embed_tokens", 0),
    "model.layers.*.input_layernorm": ("layers.*.input_layernorm", 0),
    "model.layers.*.self_attn.q_proj": ("layers.*.self_attn.qkv_proj", 0),
    "model.layers.*.self_attn.k_proj": ("layers.*.self_attn.qkv_proj", 1),
    "model.layers.*.self_attn.v_proj": ("layers.*.self_attn.qkv_proj", 2),
    "model.layers.*.self_attn.o_proj": ("layers.*.self_attn.o_proj", 0),
    "model.layers.*.post_attention_layernorm": ("layers.*.post_attention_layernorm", 0),
    "model.layers.*.mlp.gate_proj": ("layers.*.mlp.gate_up_proj", 0),
    "model.layers.*.mlp.up_proj": ("layers.*.mlp.gate_up_proj", 1),
    "model.layers.*.mlp.down_proj": ("layers.*.mlp.down_proj", 0),
    "model.norm": ("norm", 0),
    "lm_head": ("lm_head", 0),
}


def cache_specs(config: LlamaConfig) -> list[CacheSpec]:
    spec = FullAttention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
    )
    return [spec] * config.num_layers


FAMILY = Family(config=LlamaConfig, model=Llama, weights=WEIGHTS, cache_specs=cache_specs)
