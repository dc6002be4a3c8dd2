"""Figures of vLLM 0.22.0 on one H200 (dummy weights, bfloat16), by the workloads of gpu_engine.py:
ms a step, ms, tokens/s; and what that card reached.
"""

from __future__ import annotations

PEER = {
    "qwen3-0.6b": {
        "decode1": 1.68, "decode8": 2.332, "decode64": 2.680, "decode256": 6.316,
        "ttft128": 8.3, "ttft8192": 34.5, "prefill": 346822, "mixed": 18602,
    },
    "qwen3-8b": {
        "decode1": 5.20, "decode8": 5.351, "decode64": 6.188, "decode256": 11.263,
        "ttft128": 19.8, "ttft8192": 217, "prefill": 40100, "mixed": 5775,
    },
    "qwen3-30b-a3b": {
        "decode1": 4.26, "decode8": 10.62, "decode64": 18.23, "decode256": 21.77,
        "ttft128": 22.0, "ttft8192": 158, "prefill": 61582, "mixed": 5300,
    },
}  # fmt: skip
PEER_CARD = {"copy_tb_s": 4.3, "matmul_tflop_s": 790.0}
