"""Every private torch interface that the compiler uses, behind names of its own.

torch 2.11 to 2.13. Importing this file imports Dynamo (seconds), so only the planning of a model
does. Each function has a test that fails if torch takes its interface away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import get_metrics_context
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` that of new floating-point tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fake_module(
    make: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Build a module whose parameters and buffers have a shape, a dtype and the target device, but
    no storage. (`meta` would put the wrong device into the graph.)
    """
    with FakeTensorMode(), device, default_dtype(dtype):
        return make().requires_grad_(False)


def capture(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """Trace `function` (a module's method) into one graph, or raise; nothing is run.

    Dimension 0 of every input is the token count: one unbacked symbol, about which nothing may be
    assumed. The inputs are real tensors: on a fake one the mark is lost and the graph would be
    specialised to its size. Plain numbers of the model (a norm's eps) are constants of the graph,
    also where the same code was traced before with others: Dynamo would make them inputs then.
    """
    for tensor in inputs:
        mark_unbacked(tensor, 0, shape_id="tokens")
    if not hasattr(convert_frame, "fullgraph_capture"):
        return capture_with_backend(function, inputs)
    with torch.no_grad(), get_metrics_context(), _constant_numbers():
        captured = convert_frame.fullgraph_capture(function, inputs)
    assert captured.backend_input is not None, "Dynamo returned no graph"
    return captured.backend_input.graph_module


def capture_with_backend(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> fx.GraphModule:
    """The same graph through the public entry: `torch.compile` with a backend that keeps the graph
    and runs nothing. Guards and bytecode are made for naught, hence only the second choice.
    """
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, _: list[Tensor]) -> Callable[..., tuple[None]]:
        graphs.append(graph_module)
        return lambda *args: (None,)

    with torch.no_grad(), _constant_numbers():
        torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    (graph_module,) = graphs
    return graph_module


def _constant_numbers() -> contextlib.AbstractContextManager[None]:
    patch: contextlib.AbstractContextManager[None] = dynamo_config.patch(
        specialize_float=True, automatic_dynamic_shapes=False
    )
    return patch


def source_name(placeholder: fx.Node) -> str:
    """Where Dynamo found a placeholder's value, as an expression over the function's locals, for
    example `L['self']._modules['norm']._parameters['weight']`.
    """
    source = placeholder._dynamo_source  # type: ignore[attr-defined]
    name: str = source.name if isinstance(source.name, str) else source.name()
    return name


def example_value(node: fx.Node) -> Any:
    """The fake tensor or symbol that stood for a node's value while it was traced."""
    return node.meta["example_value"]


def is_symbol(value: object) -> bool:
    return isinstance(value, torch.SymInt)


def op_name(target: object) -> str | None:
    """`namespace::name` (overloads other than the default follow a dot); None if it is no torch
    operator.
    """
    if isinstance(target, OpOverload):
        return str(target.name())
    return str(target._qualified_op_name) if isinstance(target, OpOverloadPacket) else None


def drop_assertions(graph: fx.Graph) -> None:
    """Erase the runtime checks of symbolic sizes (T >= 0, equal T of all inputs), which hold by how
    the functions are called, with what only they used.
    """
    for node in list(graph.nodes):
        if op_name(node.target) == "aten::_assert_scalar":
            graph.erase_node(node)
    graph.eliminate_dead_code()
