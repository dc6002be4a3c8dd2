"""One archive is all that a start needs elsewhere: nothing is compiled there, by anybody.

Each step is a process of its own. The second machine is a home that has nothing: no cache of
Triton, FlashInfer or Inductor, and no compiler for C or CUDA.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCAB, LAYERS = 512, 4, 2, 128, 1024, 1000, 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "torch_dtype": "bfloat16",
}

OPTIONS = {"max_model_len": 2048, "max_total_tokens": 16384, "max_num_seqs": 16}

PLACES = (
    *("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR"),
    *("TOKENSPEED_CACHE_DIR", "XDG_CACHE_HOME"),
)

SERVE = """
import json
import sys

from tokenspeed import LLM, SamplingParams, ledger

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    prompts = [[(length * 3 + i) % 1000 for i in range(length)] for length in (5, 90, 700, 1500)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    ]
    with LLM(**options) as llm:
        ready = [[each.kind, each.count] for each in ledger.totals()]
        summary = llm.engine.ready.summary
        found = [llm.generate([prompt], each) for prompt, each in zip(prompts, params)]
        found.append(llm.generate(prompts, params))
        tokens = [list(each.outputs[0].token_ids) for outputs in found for each in outputs]
    served = [[each.kind, each.phase, each.count] for each in ledger.totals()]
    print(json.dumps({"ready": ready, "served": served, "tokens": tokens, "summary": summary}))
"""


class Machine:
    """A home, in which programs run that find nothing of the others."""

    def __init__(self, home: Path, *, has_compilers: bool = True) -> None:
        home.mkdir()
        self.cache = home / "cache"
        self._home = home
        self._variables = {k: v for k, v in os.environ.items() if k not in PLACES}
        self._variables |= {"HOME": str(home), "TMPDIR": str(home / "tmp")}
        self._variables["PYTHONUSERBASE"] = site.getuserbase()
        self._variables["PYTHONPATH"] = os.pathsep.join(
            map(os.path.abspath, filter(None, sys.path))
        )
        if not has_compilers:
            self._variables |= dict.fromkeys(("CC", "CXX", "FLASHINFER_NVCC"), "/bin/false")
            self._variables["FLASHINFER_DISABLE_JIT"] = "1"
        (home / "tmp").mkdir()

    def run(self, *command: str) -> str:
        """What a program of Python prints. Its log is shown if it fails."""
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self._home,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=420,
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-6000:]}"
        return done.stdout

    def warm_up(self, folder: Path, *own: str) -> str:
        flags = ["--cache-dir", str(self.cache), *own]
        for name, value in OPTIONS.items():
            flags += [f"--{name.replace('_', '-')}", str(value)]
        return self.run("-m", "tokenspeed", "warmup", str(folder), *flags)

    def serve(self, folder: Path, level: int) -> dict[str, Any]:
        options = {"model": str(folder), "skip_tokenizer_init": True, "require_cache": True}
        options |= {"cache_dir": str(self.cache), "jit_after_ready": "error", "level": level}
        options |= OPTIONS
        program = self._home / "serve.py"
        program.write_text(SERVE)
        answer: dict[str, Any] = json.loads(
            self.run(str(program), json.dumps(options)).splitlines()[-1]
        )
        return answer

    def kernels(self) -> set[str]:
        """The places of all kept GPU kernels."""
        found = {*self.cache.glob("triton/*/*"), *self.cache.glob("flashinfer/*/*")}
        return {str(path.relative_to(self.cache)) for path in found}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        norms += [f"{block}.input_layernorm", f"{block}.post_attention_layernorm"]
        shapes |= {
            f"{block}.self_attn.q_proj": (HEADS * SIZE, HIDDEN),
            f"{block}.self_attn.k_proj": (KV_HEADS * SIZE, HIDDEN),
            f"{block}.self_attn.v_proj": (KV_HEADS * SIZE, HIDDEN),
            f"{block}.self_attn.o_proj": (HIDDEN, HEADS * SIZE),
            f"{block}.mlp.gate_proj": (INNER, HIDDEN),
            f"{block}.mlp.up_proj": (INNER, HIDDEN),
            f"{block}.mlp.down_proj": (HIDDEN, INNER),
        }
    random = torch.Generator().manual_seed(5)
    tensors = {
        f"{name}.weight": 0.08 * torch.randn(shape, generator=random)
        for name, shape in shapes.items()
    }
    tensors |= {f"{n}.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=random) for n in norms}
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("level", [2, 3])
def test_a_start_elsewhere_compiles_nothing(checkpoint: Path, tmp_path: Path, level: int) -> None:
    """At level 3 nothing is measured either: the archive has the table of tiles."""
    archive = tmp_path / "model.tar"
    here = Machine(tmp_path / "here")
    own = ["--export", str(archive), *(["--autotune"] if level == 3 else [])]
    digest, name = here.warm_up(checkpoint, *own).split()
    assert name == str(archive)
    made = here.kernels()
    assert any(place.startswith("triton/") for place in made)
    want = here.serve(checkpoint, level)
    assert want["ready"] == [] and want["served"] == [], "the warmup has left something to compile"
    assert here.kernels() == made

    there = Machine(tmp_path / "there", has_compilers=False)
    printed = there.run(
        *("-m", "tokenspeed", "cache", "import", str(archive), "--sha256", digest),
        *("--cache-dir", str(there.cache)),
    )
    assert "compiled kernels imported" in printed
    assert there.kernels() == made
    got = there.serve(checkpoint, level)
    assert got["ready"] == [] and got["served"] == []
    assert there.kernels() == made, "something was compiled that no ledger knows: a launcher"
    assert "compile cache hit" in got["summary"]
    assert got["tokens"] == want["tokens"]
    assert len({tuple(tokens) for tokens in got["tokens"]}) > 1, "all requests look alike"
    assert not (tmp_path / "there" / ".triton").exists()

    again = tmp_path / "again.tar"
    there.run(
        *("-m", "tokenspeed", "cache", "export", str(checkpoint), "--output", str(again)),
        *("--cache-dir", str(there.cache)),
    )
    assert again.read_bytes() == archive.read_bytes()


def test_a_damaged_kernel_is_made_anew(checkpoint: Path, tmp_path: Path) -> None:
    here = Machine(tmp_path / "here")
    here.warm_up(checkpoint)
    made = here.kernels()
    cubins = sorted(here.cache.glob("triton/*/*/*.cubin"))
    for cubin in cubins:
        os.truncate(cubin, 100)
    options = {"model": str(checkpoint), "skip_tokenizer_init": True, "cache_dir": str(here.cache)}
    program = tmp_path / "serve.py"
    program.write_text(SERVE)
    got = json.loads(here.run(str(program), json.dumps(options | OPTIONS)).splitlines()[-1])
    kinds = dict(got["ready"])
    assert kinds.keys() == {"triton"} and 0 < kinds["triton"] <= len(cubins)
    assert len(got["tokens"]) == 8 and all(len(tokens) == 24 for tokens in got["tokens"])
    assert here.kernels() & made and here.serve(checkpoint, 2)["ready"] == []
