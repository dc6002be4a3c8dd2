"""Rotary frequencies: what a checkpoint's rope type asks for, and how long a context it allows.

Both spellings are read: `rope_scaling` {"type" or "rope_type", ...} beside a `rope_theta`, and
`rope_parameters` {"rope_type", "rope_theta", ...}. Frequencies are settled once, from the config
and `max_model_len`, so that a token's angle never depends on what else is in the batch:

- `longrope` takes its long factors if max_model_len is above the original length, else its short
  ones.
- `dynamic` serves the original length as trained. Only a larger max_model_len, asked for by name,
  stretches the base, as far as that length needs, for short prompts too.

Formulas: RoFormer (arXiv 2104.09864), position interpolation (2306.15595), YaRN (2309.00071),
LongRoPE (2402.13753), Llama 3.1's model card. In float32, in the order of transformers' operations:
at thousands of positions the last bit of a frequency shows in the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.models.fields import Fields
from tokenspeed.text.errors import ModelError

MAX_POSITIONS = 1 << 24
MAX_FACTOR = 1024.0
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rope:
    """Pair i of a head turns by position * inv_freq[i]; cos and sin are multiplied by `scale`."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A config's rope fields under one spelling. `dim` elements of each head are rotated."""

    kind: str
    dim: int
    theta: float
    max_positions: int
    original: int
    """The length before any stretching, where a rope type keeps it apart from max_positions."""
    fields: Fields
    """The rope object itself, for what only one type reads."""

    def factor(self, default: float | None = None) -> float:
        return self.fields.number("factor", default, low=1.0, high=MAX_FACTOR)

    def powers(self, theta: float | None = None) -> Tensor:
        """theta^(2i / dim): one over the plain frequencies. Float32 [dim / 2]."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        return (theta or self.theta) ** exponents


def default(settings: Settings, max_model_len: int) -> Rope:
    return _rope(1 / settings.powers())


def linear(settings: Settings, max_model_len: int) -> Rope:
    return _rope(1 / settings.powers() / settings.factor())


def dynamic(settings: Settings, max_model_len: int) -> Rope:
    """NTK-aware: a larger base slows the low frequencies and leaves the high ones alone."""
    factor, dim = settings.factor(), settings.dim
    stretch = max(max_model_len / settings.max_positions, 1.0)
    growth: float = (factor * stretch - (factor - 1)) ** (dim / (dim - 2))
    return _rope(1 / settings.powers(settings.theta * growth))


def llama3(settings: Settings, max_model_len: int) -> Rope:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    low = settings.fields.number("low_freq_factor", low=1e-3, high=1e3)
    high = settings.fields.number("high_freq_factor", low=1e-3, high=1e3)
    if high <= low:
        raise settings.fields.error("high_freq_factor", f"must be above low_freq_factor ({low:g})")
    freq = 1 / settings.powers()
    turns = settings.original / (2 * math.pi / freq)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return _rope((1 - keep) * freq / settings.factor() + keep * freq)


def yarn(settings: Settings, max_model_len: int) -> Rope:
    """Dimensions that turn often are kept, those that turn rarely interpolated, a ramp between."""
    fields, dim, factor = settings.fields, settings.dim, _ratio(settings)
    ends = []
    for name, turns in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        turns = fields.number(name, turns, low=1e-3, high=1e4)
        wave = settings.original / (turns * 2 * math.pi)
        ends.append(dim * math.log(wave) / (2 * math.log(settings.theta)))
    first, last = ends
    if fields.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((steps - first) / (last - first or 0.001)).clamp(0, 1)
    powers = settings.powers()
    freq = 1 / (factor * powers) * (1 - keep) + 1 / powers * keep
    mscale, all_dim = (
        fields.number(name, 0.0, low=0.0, high=100.0) for name in ("mscale", "mscale_all_dim")
    )
    scale = _magnitude(factor)
    if mscale and all_dim:
        scale = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    return _rope(freq, fields.number("attention_factor", scale, low=0.0, high=100.0))


def longrope(settings: Settings, max_model_len: int) -> Rope:
    """One searched factor for each frequency, from one of two lists."""
    fields, original, ratio = settings.fields, settings.original, _ratio(settings)
    lists = {
        name: fields.numbers(name, settings.dim // 2, low=1e-3, high=1e6)
        for name in ("short_factor", "long_factor")
    }
    chosen = lists["long_factor" if max_model_len > original else "short_factor"]
    factors = torch.tensor(chosen, dtype=torch.float32, device="cpu")
    scale = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    scale = fields.number("attention_factor", scale, low=0.0, high=100.0)
    return _rope(1 / (factors * settings.powers()), scale)


@dataclass(frozen=True)
class Rule:
    """How a rope type turns, and the longest context it allows: trained positions, stretched or
    not.
    """

    rope: Callable[[Settings, int], Rope]
    limit: Callable[[Settings], float]


RULES: dict[str, Rule] = {
    "default": Rule(default, lambda s: s.max_positions),
    "linear": Rule(linear, lambda s: s.max_positions * s.factor()),
    "dynamic": Rule(dynamic, lambda s: s.max_positions * s.factor()),
    "llama3": Rule(llama3, lambda s: s.max_positions),
    "yarn": Rule(yarn, lambda s: s.original * _ratio(s)),
    "longrope": Rule(longrope, lambda s: s.max_positions),
}


def resolve_rope(config: Fields, head_dim: int, max_model_len: int | None) -> tuple[Rope, int]:
    """The rope of a model and the context it serves: what was asked for, or what it was made for.

    Raises ModelError for an unknown type, a field out of bounds, or a max_model_len above the
    limit.
    """
    settings = read_settings(config, head_dim)
    rule = RULES[settings.kind]
    limit = int(min(rule.limit(settings), MAX_POSITIONS))
    if max_model_len is None:
        max_model_len = settings.max_positions if settings.kind == "dynamic" else limit
    if max_model_len > limit:
        raise ModelError(
            f"max_model_len {max_model_len} is above the model's limit of {limit} tokens "
            f"(max_position_embeddings {settings.max_positions}, rope type {settings.kind}); "
            f"ask for {limit} or less"
        )
    return rule.rope(settings, max_model_len), max_model_len


def read_settings(config: Fields, head_dim: int) -> Settings:
    """Normalise the two spellings. Where both objects are given, `rope_scaling` counts."""
    name = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    values = config.values.get(name) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise config.error(name, "must be one flat object; a rope for each layer type is not known")
    values = {key: value for key, value in values.items() if value is not None}
    kind = values.get("rope_type", values.get("type"))
    if kind is None and "factor" in values:
        raise config.error(name, "has a factor but no rope_type")
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in RULES:
        known = ", ".join(RULES)
        raise config.error(
            name, f"has rope type {kind!r:.60}, which is not supported (known: {known})"
        )
    beside = {key: config.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    fields = Fields(beside | values, f"{config.where}: {name}")
    dim = int(head_dim * fields.number("partial_rotary_factor", 1.0, low=0.0, high=1.0))
    if dim < 4 or dim % 2:
        raise config.error(name, f"rotates {dim} elements a head; it must be even and at least 4")
    max_positions = config.count("max_position_embeddings", low=2, high=MAX_POSITIONS)
    original = max_positions
    for place in (fields, config):
        original = place.count(_ORIGINAL, original, low=2, high=MAX_POSITIONS)
    return Settings(
        kind=kind,
        dim=dim,
        theta=fields.number("rope_theta", 10000.0, low=1.01, high=1e15),
        max_positions=max_positions,
        original=original,
        fields=fields,
    )


def _ratio(settings: Settings) -> float:
    """How far the context is stretched: `factor`, or where it is absent the two lengths' ratio."""
    return settings.factor(max(settings.max_positions / settings.original, 1.0))


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's correction of the attention's entropy."""
    return 0.1 * mscale * math.log(factor) + 1.0


def _rope(freq: Tensor, scale: float = 1.0) -> Rope:
    return Rope(tuple(freq.tolist()), scale)
