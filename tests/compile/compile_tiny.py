"""Small models for compile tests: blocks of several kinds, with ways to break what plans rely on,
and every family's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenspeed.batch import forward_context
from tokenspeed.kernels.attend import attend, reference
from tokenspeed.models import family_of
from tokenspeed.models.family import DecoderConfig, Family

HIDDEN, HEADS, KV_HEADS, DIM, VOCAB = 32, 4, 2, 8, 50


class Attention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.q = nn.Linear(HIDDEN, HEADS * DIM)
        self.kv = nn.Linear(HIDDEN, 2 * KV_HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (-1, DIM)) for part in (self.q(x), k, v))
        return self.out(attend(q * cos, k * cos, v, self.layer).flatten(1))


class Block(nn.Module):
    def __init__(self, kind: str, layer: int, leak: bool) -> None:
        super().__init__()
        self.attention = Attention(layer)
        self.leak = leak
        inner = {"a": 16, "b": 24, "c": 40}[kind]
        self.up, self.down = nn.Linear(HIDDEN, inner), nn.Linear(inner, HIDDEN)

    def forward(self, x: Tensor, cos: Tensor) -> Tensor:
        h = x + self.attention(x, cos)
        y = h + self.down(F.silu(self.up(h)))
        return y * (1 + self.attention.layer) if self.leak else y


class Tiny(nn.Module):
    """`kinds` is a letter a block. `leak`: blocks compute with their index. `skip`: the third last
    block's input is added to the end. `far`: blocks also see what came two blocks before.
    """

    def __init__(
        self, kinds: str, leak: bool = False, skip: bool = False, far: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(kind, i, leak) for i, kind in enumerate(kinds))
        self.register_buffer("frequencies", torch.empty(DIM), persistent=False)
        self.skip, self.far = skip, far

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos = torch.outer(positions.to(x.dtype), self.frequencies).cos()[:, None]
        kept = [x]
        for layer in self.layers:
            if self.far and 2 < len(kept) < len(self.layers):
                x = x + kept[-3]
            x = layer(x, cos)
            kept.append(x)
        return x + kept[-4] if self.skip else x

    def head(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.tokens.weight)


def tiny_family(architecture: str, **changes: Any) -> tuple[Family, DecoderConfig]:
    """A family's row, and a config of six layers; `changes` are of config.json."""
    hf_config = {
        "architectures": [architecture],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
    } | changes
    family = family_of(hf_config)
    return family, family.config.from_dict(hf_config)


def random_model(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters of `dtype` and buffers, all at random; `fill_buffers` puts computed ones right."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = make().requires_grad_(False)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(0.0, 0.2)
        for parameter in model.parameters():
            parameter.data = parameter.to(dtype)
    return model


class OneSequence:
    """Attends the whole step as one sequence, with a scale that betrays a wrong layer index."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        assert sinks is None
        return reference(q, k, v, 0.3 + 0.1 * layer)


@contextmanager
def one_sequence() -> Iterator[None]:
    with forward_context(OneSequence()):
        yield
