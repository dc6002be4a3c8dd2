"""The bundled model, whole: its weights by their digest, its logits against the golden values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import load_ours
from dense_state import Sequence
from smollm2_folder import write_smollm2_folder

from tokenspeed.text.source import eos_token_ids, resolve_model
from tokenspeed.text.tokenizer import load_tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())
DECISIVE_NATS = 0.02

MakeSequence = Callable[[], Sequence]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2_folder(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, MakeSequence]:
    return {
        "weights_gguf_fp32_compute_fp32": load_ours("smollm2")[1],
        "weights_bf16_compute_fp32": load_ours(folder)[1],
    }


def test_the_folder_is_the_known_one(folder: Path) -> None:
    """The digest covers the names, order, shapes and every bit of all 272 tensors."""
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest == GOLDEN["exported_folder_sha256"]["model.safetensors"]


def test_the_folders_tokenizer_is_the_files(folder: Path) -> None:
    sources = [resolve_model(name) for name in (str(folder), "smollm2")]
    ours, theirs = map(load_tokenizer, sources)
    text = "Let's count:  1, 22, 333\n\tdef f(x): return 'naïve 🫠'<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template and ours.chat_template
    assert [eos_token_ids(source) for source in sources] == [{2}, {2}]


@pytest.mark.parametrize("run", ["weights_gguf_fp32_compute_fp32", "weights_bf16_compute_fp32"])
@pytest.mark.parametrize("case", range(len(GOLDEN["prompts"])))
def test_teacher_forced(models: dict[str, MakeSequence], run: str, case: int) -> None:
    """Fed the golden ids, the likeliest token is the golden one at every step that is decided."""
    prompt = GOLDEN["prompts"][case]
    golden, prompt_ids = prompt["runs"][run], prompt["prompt_ids"]
    ids = golden["ids_ignore_eos"]
    logits = models[run]().feed(prompt_ids + ids[:-1])[len(prompt_ids) - 1 :]
    top = logits.log_softmax(-1).topk(2)
    decided = torch.tensor(golden["top2_margin"]) >= DECISIVE_NATS
    assert decided.sum() > 50
    assert torch.equal(top.indices[decided, 0], torch.tensor(ids)[decided])
    margins = top.values[:, 0] - top.values[:, 1]
    assert (margins - torch.tensor(golden["top2_margin"])).abs().max() < 1e-3


def test_first_answer(models: dict[str, MakeSequence]) -> None:
    """Greedy, with a cache, to the first end of sequence."""
    prompt = GOLDEN["prompts"][0]
    for run, sequence in models.items():
        expected = prompt["runs"][run]["ids_ignore_eos"][: prompt["runs"][run]["eos_at"] + 1]
        assert sequence().greedy(prompt["prompt_ids"], len(expected)) == expected
