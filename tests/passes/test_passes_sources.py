"""Lines of the model through every rewrite, and the bytes that a pass saves."""

from __future__ import annotations

import torch
from pass_graphs import captured_forward, manager_for, pieces_of, through_slot

from tokenspeed.passes.sources import origins_of, place_of, sources_of

F32 = torch.float32

TRACE = """
  File "/home/one/model.py", line 7, in forward
    return self.block(x)
  File "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(x)
  File "/home/one/layers.py", line 20, in norm
    y = x.float()
  File "/home/one/layers.py", line 24, in norm
    return y * y
"""


def test_a_place_is_the_last_line_and_the_last_of_another_file() -> None:
    assert place_of(TRACE) == "one/model.py:7 > one/layers.py:24"
    assert place_of("") == ""
    lines = TRACE.splitlines()
    assert place_of("\n".join(lines[5:])) == "one/layers.py:20 > one/layers.py:24"
    assert place_of("\n".join(lines[:3])) == "one/model.py:7"


def test_fused_ops_know_the_lines_that_they_came_from() -> None:
    piece = pieces_of(captured_forward("Qwen3ForCausalLM", F32))[1]
    slot = through_slot(piece, manager_for(F32, strict=True))
    before = {node.name: node for node in slot.manager.stages[0][1].nodes}
    fused = [node for node in slot.after.graph.nodes if "tokenspeed" in str(node.target)]
    assert len(fused) == 5
    for node in fused:
        replaced = [before[name] for name in origins_of(node)]
        assert len(replaced) > 5
        assert set(sources_of(node)) == {place for each in replaced for place in sources_of(each)}
    norms = [node for node in fused if "add_rms_norm" in str(node.target)]
    assert len({sources_of(node) for node in norms}) == 2, "each norm has lines of its own"
    calls = [node for node in slot.after.graph.nodes if node.op == "call_function"]
    assert all(sources_of(node) for node in calls)
    assert all(place.startswith("models/") for node in calls for place in sources_of(node))


def test_inlined_ops_keep_them() -> None:
    piece = pieces_of(captured_forward("LlamaForCausalLM", F32))[1]
    slot = through_slot(piece, manager_for(F32, inline=True, strict=True))
    calls = [node for node in slot.after.graph.nodes if node.op == "call_function"]
    assert all(sources_of(node) and origins_of(node) for node in calls)


def test_bytes_that_fusing_saves() -> None:
    """silu_mul of [T, 96] in float32: the halves are views; neg, exp, add and div write 48 each and
    read 48, 48, 48 and 96; the product reads 96 and writes 48. Fused: reads 96, writes 48.
    """
    piece = pieces_of(captured_forward("LlamaForCausalLM", F32))[1]
    slot = through_slot(piece, manager_for(F32, strict=True))
    saved = {report.name: report.saved for report in slot.manager.reports if report.matched}
    assert saved["silu_mul"] == 4 * (4 * 48 + 48 * 3 + 96)
    # Both fuse what no other op moved: never more than the whole graph.
    assert all(number > 0 for number in saved.values())
