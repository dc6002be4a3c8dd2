"""docs/grafana-dashboard.json: every expression asks for what /metrics shows, by labels it has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import Asker, FakeClient, make_state

from tokenspeed.engine.messages import Stats
from tokenspeed.ledger import JitCount

BOARD = json.loads((Path(__file__).parents[2] / "docs/grafana-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [each for each in BOARD["panels"] if each["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
FUNCTIONS = {"sum", "max", "rate", "increase", "histogram_quantile", "by"}
SHOWN = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})?")


def parts(expression: str) -> tuple[set[str], set[str], set[str]]:
    """Metric names, labels, and everything else that is a word."""
    names, labels = set(), set()
    rest = expression.replace("[$__rate_interval]", "")
    for group in re.findall(r"\bby \(([^)]*)\)", rest):
        labels |= {each.strip() for each in group.split(",")}
    rest = re.sub(r"\bby \([^)]*\)", "by", rest)
    words = set()
    for word, matchers in SHOWN.findall(rest):
        if word.startswith(("tokenspeed:", "process_")):
            names.add(word)
            labels |= set(re.findall(r"(\w+)\s*(?:=~|=|!=)", matchers))
        else:
            words.add(word)
    return names, labels, words


async def samples() -> dict[str, set[str]]:
    """Sample name -> its labels, of a server where everything has happened once."""
    client = FakeClient()
    client.stats = Stats(jit=(JitCount("triton", "serving", 1, 0.25),))
    ask = Asker(client, make_state(client))
    await ask.completion()
    text = (await ask.http.get("/metrics")).text
    await ask.http.aclose()
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_every_expression_names_what_is_shown() -> None:
    found = await samples()
    for expression in EXPRESSIONS:
        names, labels, words = parts(expression)
        assert names and names <= found.keys(), expression
        assert all(labels <= found[name] for name in names), expression
        assert words <= FUNCTIONS, expression
        assert expression.count("(") == expression.count(")"), expression
    query = BOARD["templating"]["list"][1]["query"]
    match = re.fullmatch(r"label_values\((\S+), (\w+)\)", query)
    assert match and match[2] in found[match[1]]


@pytest.mark.parametrize(
    ("expression", "names", "labels", "words"),
    [
        ("tokenspeed:a", {"tokenspeed:a"}, set(), set()),
        ('avg(rate(tokenspeed:a{b=~"$c"}[$__rate_interval]))', {"tokenspeed:a"}, {"b"}, {"avg"}),
        ("sum by (le, x) (tokenspeed:a) / 2", {"tokenspeed:a"}, {"le", "x"}, set()),
    ],
)
def test_expressions_are_read(
    expression: str, names: set[str], labels: set[str], words: set[str]
) -> None:
    found = parts(expression)
    assert found[:2] == (names, labels) and found[2] - FUNCTIONS == words


def test_panels_lie_side_by_side() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert all(panel["targets"] and panel["title"] for panel in PANELS)


def test_the_board_shows_what_users_watch() -> None:
    names = {name for expression in EXPRESSIONS for name in parts(expression)[0]}
    stems = {re.sub(r"_(bucket|total)$", "", name.removeprefix("tokenspeed:")) for name in names}
    assert stems >= {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "generation_tokens"),
        *("request_queue_time_seconds", "e2e_request_latency_seconds", "prefix_cache_hits"),
        *("num_preemptions", "request_success", "jit_compiles", "graphs_to_come"),
    }
