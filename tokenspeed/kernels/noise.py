"""Counter-based noise: the Gumbel numbers that turn an argmax into a sample.

A number is a pure function of (seed, sample index, position, token id), so a request draws the same
tokens alone, in any batch, after a preemption and in another process. No generator has a state.

    (seed, sample index, position) --splitmix64, chained--> a 64-bit key for each row
    (key, token id) --32-bit finaliser, the key entering twice--> 31 bits for each token
    u = (bits + 1/2) / 2^31,   E = -log(1 - u),   gumbel = -log(E)

The bits are equal on every device (integer arithmetic wraps everywhere); the two logarithms may
differ in their last place. Sources: Steele et al. 2014 (splitmix64), Wellons 2018 (lowbias32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.kernels.triton_jit import jit, tl


def _signed(value: int, bits: int) -> int:
    """The two's complement integer with the same bits: torch has no unsigned arithmetic."""
    return value - (1 << bits) if value >> (bits - 1) else value


_GAMMA = _signed(0x9E3779B97F4A7C15, 64)
_MIX_1 = _signed(0xBF58476D1CE4E5B9, 64)
_MIX_2 = _signed(0x94D049BB133111EB, 64)
_LOW_1 = _signed(0x7FEB352D, 32)
_LOW_2 = _signed(0x846CA68B, 32)


def row_keys(seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """A 64-bit key for each row; all arguments and the result are int64 [R]."""
    return _mix64(_mix64(_mix64(seeds) ^ samples) ^ positions)


def random_bits(keys: Tensor, vocab_size: int) -> Tensor:
    """31 random bits for every row's key and token: int32 [R, V], not negative."""
    low = keys.to(torch.int32)[:, None]  # the cast keeps the low 32 bits
    high = (keys >> 32).to(torch.int32)[:, None]
    bits = low ^ torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits ^= (bits >> 16) & 0xFFFF  # masked: the shift of a signed integer copies its sign
    bits *= _LOW_1
    bits += high
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _LOW_2
    bits ^= (bits >> 16) & 0xFFFF
    bits &= 0x7FFFFFFF
    return bits


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [R, V], always finite (-2.9 to 22.2)."""
    u = random_bits(keys, vocab_size).float().add_(0.5).mul_(2.0**-31)
    u.clamp_(max=1.0 - 2.0**-24)  # the nearest float32 below 1
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix64(value: Tensor) -> Tensor:
    value = value + _GAMMA
    value = (value ^ ((value >> 30) & (1 << 34) - 1)) * _MIX_1
    value = (value ^ ((value >> 27) & (1 << 37) - 1)) * _MIX_2
    return value ^ ((value >> 31) & (1 << 33) - 1)


# The same in kernels, whose literals are the constants above.


@jit
def row_key(seed, sample, position):  # type: ignore[no-untyped-def]
    """The key of one row, of int64 scalars."""
    return _mix(_mix(_mix(seed) ^ sample) ^ position)


@jit
def bits_of(key, token):  # type: ignore[no-untyped-def]
    """31 random bits for tokens of the row of `key`: int32, not negative."""
    bits = key.to(tl.int32) ^ token
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 2146121005
    bits += (key >> 32).to(tl.int32)
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= -2073254261
    bits ^= (bits >> 16) & 0xFFFF
    return bits & 0x7FFFFFFF


@jit
def uniform_of(bits):  # type: ignore[no-untyped-def]
    """float32 in (0, 1)."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)


@jit
def gumbel_of(bits):  # type: ignore[no-untyped-def]
    """The Gumbel number of such bits. Its logarithms are float64: 1 - u is exact there, and the
    kernels call this for few tokens.
    """
    wait = -tl.log(1.0 - uniform_of(bits).to(tl.float64))
    return -tl.log(wait.to(tl.float32).to(tl.float64)).to(tl.float32)


@jit
def _mix(value):  # type: ignore[no-untyped-def]
    value += -7046029254386353131
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return value ^ ((value >> 31) & 0x1FFFFFFFF)
