"""Small llama models as GGUF files whose matrices are stored in given types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 92, 3
_SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def write_llama(path: Path, types: Mapping[str, str], default: str = "Q4_1") -> Path:
    """Write a llama of four heads; `types` has the type of a tensor by its name without `.weight`
    ("blk.0.attn_q", "token_embd"), or of that tensor in all layers ("attn_q"). The head is tied.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(VOCAB - 1)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (VOCAB, HIDDEN)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in _SHAPES.items()}
    for name, shape in shapes.items():
        kind = types.get(name, types.get(name.rpartition(".")[2], default))
        kind_number = GGMLQuantizationType[kind]
        values = draw.standard_normal(shape, dtype=np.float32) / shape[1] ** 0.5
        data = quants.quantize(values, kind_number)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind_number)
    norms = [f"blk.{i}.{name}" for i in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
