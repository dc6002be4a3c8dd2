"""Graphs as Inductor's slot for passes sees them, without the C++ that would follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import standalone_compile
from torch._inductor.custom_graph_pass import CustomGraphPass

from tokenspeed.compile import torch_api
from tokenspeed.compile.capture import Captured, capture, example_ids
from tokenspeed.compile.matcher import InductorPass, pass_manager
from tokenspeed.compile.plan import PieceCall
from tokenspeed.compile.split import split
from tokenspeed.models import family_of
from tokenspeed.passes import Stage
from tokenspeed.passes.manager import PassManager

CPU = torch.device("cpu")
TOKENS = 7


def tiny_model(architecture: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
    """A family's model of three layers, without storage."""
    hf_config = {
        "architectures": [architecture],
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
    } | changes
    family = family_of(hf_config)
    config = family.config.from_dict(hf_config)
    return torch_api.fake_module(lambda: family.model(config), dtype, CPU)


def captured_forward(architecture: str, dtype: torch.dtype, **changes: Any) -> Captured:
    model = tiny_model(architecture, dtype, **changes)
    return capture(model.forward, (torch.zeros(8, 32, dtype=dtype), example_ids(CPU)))


def pieces_of(captured: Captured) -> list[fx.GraphModule]:
    """The first, the middle and the last piece."""
    plan, pieces = split(captured)
    names = [row.piece for row in plan.rows if isinstance(row, PieceCall)]
    return [pieces[name] for name in dict.fromkeys(names)]


def piece_of(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The one piece of a module's forward, for any size of its inputs' first dimension."""
    (piece,) = split(capture(module.forward, inputs))[1].values()
    return piece


class _Enough(Exception):
    pass


@dataclass
class Slot:
    """A piece's graph before and after the passes, and the manager that ran them."""

    before: fx.GraphModule
    after: fx.GraphModule
    manager: PassManager

    @property
    def counts(self) -> dict[str, int]:
        """Matches of all passes but the cleaning and the lowering ones."""
        counts = self.manager.counts
        return {name: n for name, n in counts.items() if name not in ("noop", "inline")}

    def ops(self) -> list[str]:
        names = (torch_api.op_name(node.target) or "" for node in self.after.graph.nodes)
        return sorted(name for name in names if name.startswith("tokenspeed::"))

    def assert_equal(self, seed: int = 0) -> None:
        """Both graphs give the same tensors, bit for bit."""
        torch.manual_seed(seed)
        values = [random_value(node.meta["val"]) for node in placeholders(self.before)]
        for want, got in zip(self.before(*values), self.after(*values), strict=True):
            assert torch.equal(want, got)


def through_slot(piece: fx.GraphModule, manager: PassManager) -> Slot:
    """Take `piece` to Inductor's slot, run the manager there, and go no further."""
    slots: list[Slot] = []

    class Visit(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            before = _keep(graph)
            manager(graph)
            slots.append(Slot(before, _keep(graph), manager))
            raise _Enough

        def uuid(self) -> str:
            return "of no compiled graph, so that no cache is hit"

    with pytest.raises(Exception, match="_Enough"):
        _compile(piece, Visit())
    return slots[0]


def compile_piece(piece: fx.GraphModule, manager: PassManager) -> Callable[..., Any]:
    """Through all of Inductor; its caches would keep the passes from running."""
    return _compile(piece, InductorPass(manager), force_disable_caches=True)


def _compile(piece: fx.GraphModule, graph_pass: CustomGraphPass, **patches: Any) -> Any:
    examples = [torch_api.example_value(node) for node in placeholders(piece)]
    patches["post_grad_custom_pre_pass"] = graph_pass
    with warnings.catch_warnings():  # from inside Inductor
        warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*")
        return standalone_compile(
            piece, examples, dynamic_shapes="from_graph", options={"config_patches": patches}
        )


def manager_for(dtype: torch.dtype, *, inline: bool = False, **options: Any) -> PassManager:
    """All passes over pieces; fused ops stay, or are inlined."""
    off = ["weight_layout"] if inline else ["weight_layout", "inline"]
    return pass_manager(Stage.PIECE, dtype=dtype, device="cpu", disabled=off, **options)


def placeholders(graph_module: fx.GraphModule) -> list[fx.Node]:
    return list(graph_module.graph.find_nodes(op="placeholder"))


def random_value(fake: Any) -> Any:
    """A real tensor for a fake one whose only unknown size is the token count."""
    if not isinstance(fake, Tensor):
        return TOKENS
    shape = [size if isinstance(size, int) else TOKENS for size in fake.shape]
    if not fake.dtype.is_floating_point:
        return torch.arange(TOKENS).expand(shape)
    return torch.randn(shape).to(fake.dtype)


def _keep(graph: fx.Graph) -> fx.GraphModule:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return fx.GraphModule(nn.Module(), copy)
