"""The manager: order, counts, switches, reports, failures, stages and the uuid."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from tokenspeed.compile.dump import write_stages
from tokenspeed.passes.manager import PassFailed, PassManager, Step, digest_of, pass_sources
from tokenspeed.passes.rewrite import TokenRange


def graph_of_two() -> fx.Graph:
    """relu(neg(x))."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = "kept"
    graph.output((graph.call_function(torch.relu, (graph.call_function(torch.neg, (x,)),)),))
    fx.GraphModule(nn.Module(), graph)
    return graph


def targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def abs_for_neg(graph: fx.Graph) -> int:
    found = [node for node in graph.nodes if node.target is torch.neg]
    for node in found:
        node.target = torch.abs
    return len(found)


def count_relu(graph: fx.Graph) -> int:
    return sum(node.target is torch.relu for node in graph.nodes)


def fails_in_the_middle(graph: fx.Graph) -> int:
    abs_for_neg(graph)
    raise ZeroDivisionError("halfway")


def leaves_a_broken_graph(graph: fx.Graph) -> int:
    first, second = (node for node in graph.nodes if node.op == "call_function")
    second.append(first)
    return 1


def make(*steps: Step, **changes: Any) -> PassManager:
    options: dict[str, Any] = {"token_range": TokenRange(), "options": {"dtype": "float32"}}
    return PassManager(list(steps), **{**options, **changes})


def test_passes_run_in_order_and_are_counted() -> None:
    seen: list[str] = []
    steps = [
        Step(name, lambda graph, n=name: seen.append(n) or abs_for_neg(graph)) for name in "cab"
    ]
    manager, graph = make(*steps), graph_of_two()
    manager(graph)
    assert seen == ["c", "a", "b"]
    assert manager.counts == {"c": 1}
    assert [report.matched for report in manager.reports] == [1, 0, 0]
    assert targets(graph) == [torch.abs, torch.relu]


def test_reports_are_of_the_last_graph() -> None:
    manager, graph = make(Step("a", abs_for_neg)), graph_of_two()
    manager(graph)
    manager(graph)
    assert [report.matched for report in manager.reports] == [0]


def test_a_pass_that_is_off_says_why() -> None:
    manager, graph = make(Step("a", abs_for_neg, off="disabled")), graph_of_two()
    manager(graph)
    assert targets(graph) == [torch.neg, torch.relu]
    assert manager.reports[0].off == "disabled"


def test_dead_nodes_are_removed_after_a_pass() -> None:
    def skip_neg(graph: fx.Graph) -> int:
        (relu,) = (node for node in graph.nodes if node.target is torch.relu)
        relu.args = (next(iter(graph.nodes)),)
        return 1

    graph = graph_of_two()
    make(Step("a", skip_neg))(graph)
    assert targets(graph) == [torch.relu]


@pytest.mark.parametrize(
    ("broken", "error"),
    [(fails_in_the_middle, "ZeroDivisionError: halfway"), (leaves_a_broken_graph, "RuntimeError")],
)
def test_a_pass_that_fails_is_undone_named_and_skipped(
    broken: Any, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager, graph = make(Step("bad", broken), Step("good", count_relu)), graph_of_two()
    with caplog.at_level(logging.WARNING, "tokenspeed"):
        manager(graph)
    assert targets(graph) == [torch.neg, torch.relu]
    graph.lint()
    assert next(iter(graph.nodes)).meta["val"] == "kept"
    assert manager.counts == {"good": 1}
    assert manager.reports[0].error is not None and manager.reports[0].error.startswith(error)
    assert "the pass bad failed and is skipped" in caplog.text


@pytest.mark.parametrize("broken", [fails_in_the_middle, leaves_a_broken_graph])
def test_strict_mode_raises(broken: Any) -> None:
    with pytest.raises(PassFailed, match="the pass bad failed"):
        make(Step("bad", broken), strict=True)(graph_of_two())


def test_a_shortfall_is_told(caplog: pytest.LogCaptureFixture) -> None:
    stale = Step("stale", lambda graph: 0, expected=count_relu)
    manager = make(stale)
    with caplog.at_level(logging.INFO, "tokenspeed"):
        manager(graph_of_two())
    assert manager.reports[0].is_short
    assert "stale matched 0 of 1: its pattern does not match the graph" in caplog.text
    with pytest.raises(PassFailed, match="stale matched 0 of 1"):
        make(stale, strict=True)(graph_of_two())


def test_a_refusal_is_told_and_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[str] = []

    def refuse(graph: fx.Graph) -> int:
        refused.extend(["wrong dtype", "wrong dtype"])
        return 0

    manager = make(Step("careful", refuse, count_relu, None, refused), strict=True)
    with caplog.at_level(logging.INFO, "tokenspeed"):
        manager(graph_of_two())
        manager(graph_of_two())
    assert manager.reports[0].refused == ("wrong dtype",)
    assert "careful matched 0 of 1: wrong dtype" in caplog.text


def test_graphs_are_kept_before_each_change_and_after_all(tmp_path: Path) -> None:
    manager = make(Step("a", abs_for_neg), Step("b", lambda graph: 0))
    manager(graph_of_two())
    texts = {name: str(graph) for name, graph in manager.stages}
    assert list(texts) == ["a", ""]
    assert "torch.neg" in texts["a"] and "torch.neg" not in texts[""]
    write_stages(tmp_path / "new", "piece-0123-all", manager.stages)
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == {
        "piece-0123-all-0-before-a.txt": f"{texts['a']}\n",
        "piece-0123-all-1-after.txt": f"{texts['']}\n",
    }


def test_the_uuid_follows_all_that_decides(tmp_path: Path) -> None:
    source = tmp_path / "extra.py"
    source.write_text("one")

    def uuid(*steps: Step, **changes: Any) -> str:
        return make(*steps, **{"sources": [source], **changes}).uuid()

    step = Step("a", abs_for_neg)
    assert uuid(step) == uuid(Step("a", count_relu))  # code is known by its source
    different = [
        uuid(step),
        uuid(),
        uuid(Step("b", abs_for_neg)),
        uuid(Step("a", abs_for_neg, off="disabled")),
        uuid(step, token_range=TokenRange(1, 256)),
        uuid(step, token_range=TokenRange(257)),
        uuid(step, options={"dtype": "bfloat16"}),
        uuid(step, sources=[]),
    ]
    source.write_text("two")
    different.append(uuid(step))
    assert len(set(different)) == len(different)


def test_a_digest_is_of_names_and_contents_not_of_places(tmp_path: Path) -> None:
    def digest(folder: str, room: str, name: str, text: str) -> str:
        path = tmp_path / folder / room / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return digest_of([path])

    here = digest("a", "passes", "noop.py", "x")
    assert digest("b", "passes", "noop.py", "x") == here
    assert digest("a", "kernels", "noop.py", "x") != here
    assert digest("a", "passes", "rope.py", "x") != here
    assert digest("a", "passes", "noop.py", "y") != here


def test_sources_are_those_of_passes_and_kernels() -> None:
    names = {f"{path.parent.name}/{path.name}" for path in pass_sources()}
    assert {"passes/manager.py", "kernels/silu_mul.py", "cpu/vector.h"} <= names
    assert {name.partition("/")[0] for name in names} == {"passes", "kernels", "cpu"}


@pytest.mark.parametrize(
    ("outer", "inner", "holds"),
    [
        (TokenRange(), TokenRange(), True),
        (TokenRange(), TokenRange(5, 9), True),
        (TokenRange(0, 256), TokenRange(), False),
        (TokenRange(0, 256), TokenRange(1, 256), True),
        (TokenRange(0, 256), TokenRange(1, 257), False),
        (TokenRange(257), TokenRange(257), True),
        (TokenRange(257), TokenRange(1, 300), False),
    ],
)
def test_token_ranges(outer: TokenRange, inner: TokenRange, holds: bool) -> None:
    assert outer.contains(inner) == holds
