"""Small GGUF files for tests, written from the format's description."""

from __future__ import annotations

import struct
from typing import Any

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
F32 = 0


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> tuple[int, bytes]:
    """The kind and bytes of one metadata value; ints become uint32, floats float32."""
    if isinstance(item, bool):
        return BOOL, struct.pack("<B", item)
    if isinstance(item, int):
        return (INT32, struct.pack("<i", item)) if item < 0 else (UINT32, struct.pack("<I", item))
    if isinstance(item, float):
        return FLOAT32, struct.pack("<f", item)
    if isinstance(item, str):
        return STRING, text(item)
    kind = value(item[0])[0] if item else UINT32
    body = b"".join(value(element)[1] for element in item)
    return ARRAY, struct.pack("<IQ", kind, len(item)) + body


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], list[float]]] | None = None,
    version: int = 3,
) -> bytes:
    """A whole file; `tensors` maps names to a row-major shape and float32 values."""
    tensors = tensors or {}
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, item in metadata.items():
        kind, raw = value(item)
        out += text(key) + struct.pack("<I", kind) + raw
    data = b""
    for name, (shape, values) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += text(name) + struct.pack("<I", len(shape)) + dims
        out += struct.pack("<IQ", F32, len(data))
        raw = struct.pack(f"<{len(values)}f", *values)
        data += raw + b"\0" * (-len(raw) % 32)
    return out + b"\0" * (-len(out) % 32) + data if tensors else out


def llama_metadata(**extra: Any) -> dict[str, Any]:
    """What a small llama file says; `extra` uses "__" for the dot in a key."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.eos_token_id": 3,
    }
    return metadata | {key.replace("__", "."): item for key, item in extra.items()}
