"""`tokenspeed explain` on a real entry: tables, kernels with their lines, JSON, a page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from engine_tiny import tiny_config

from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import GRAPHS, Damaged, Entry, read_entry
from tokenspeed.compile.explanation import Explanation, explanation_of
from tokenspeed.engine import warmup
from tokenspeed.engine.compile_job import CompileFailed, CompileJob
from tokenspeed.engine.explain import explain
from tokenspeed.engine.explain_text import places_in_short, text_of
from tokenspeed.options import ConfigError


@pytest.fixture(scope="module")
def entry(tiny_cache: Path) -> Entry:
    (folder,) = CompileCache(tiny_cache).entry_folders()
    return read_entry(folder)


@pytest.fixture(scope="module")
def explained(entry: Entry) -> Explanation:
    return explanation_of(entry)


def test_pieces_are_named_in_order_and_counted(explained: Explanation) -> None:
    calls = {piece.name: piece.calls for piece in explained.pieces}
    assert calls == {"embed": 1, "forward 1": 1, "forward 2": 2, "forward 3": 1, "head": 1}
    assert (explained.layers, explained.layer) == (3, "forward 2")
    layer = explained.pieces[2]
    sources = {each.source: each.value for each in layer.inputs}
    assert sources["layers.0.mlp.down_proj.weight"] == "float32 [32, 48]"
    assert sources["result of attend"] == "float32 [T, 4, 8]"
    assert layer.outputs[0] == "float32 [T, 32]"


def test_kernels_know_the_lines_of_the_model(explained: Explanation) -> None:
    for piece in explained.pieces:
        (view,) = piece.ranges.values()
        assert view.graphs.kernels
        for kernel in view.graphs.kernels:
            assert kernel.sources and all(each.startswith("models/") for each in kernel.sources)
    (layer,) = explained.pieces[2].ranges.values()
    names = [kernel.name for kernel in layer.graphs.kernels]
    assert sum("tokenspeed.linear" in name for name in names) == 4
    assert sum(name.startswith("cpp_fused") for name in names) == len(names) - 4
    silu = next(kernel for kernel in layer.graphs.kernels if "silu" in kernel.name)
    assert "div" in " ".join(silu.ops)
    assert any(place.startswith("models/llama.py") for place in silu.sources)


def test_the_table_of_passes(explained: Explanation) -> None:
    text = text_of(explained)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["rope"][:5] == ["-", "2/2", "2/2", "-", "-"]
    assert rows["add_rms_norm"][:5] == ["-", "-", "2/2", "2/2", "-"]
    assert rows["silu_mul"][5:] == ["1.1", "KiB"] or rows["silu_mul"][-1] == "KiB"
    assert rows["linear_add"][:1] == ["off"]
    assert "qk_norm_rope in forward" in text, "no norm of heads in a llama: the nearest is told"
    assert "the pattern gives aten.slice a aten.mul, the graph aten." in text


def test_it_prints_what_is_in_the_cache(
    tiny_model: str, tiny_cache: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tiny_config(tiny_model, cache_dir=str(tiny_cache))
    assert explain(config, as_json=False, html=None) == 0
    assert "Kernels of forward 2" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert explain(config, as_json=True, html=str(page)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    ops = found["pieces"][2]["ranges"]["all"]["graphs"]["before"]
    assert any(op["op"] == "aten.rsqrt" for op in ops)
    check_page(page.read_text(), num_pieces=5)


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag


def check_page(text: str, num_pieces: int) -> None:
    """Well formed, nothing loaded, a pair of graphs a piece, arcs between ops that are there."""
    page = Page()
    page.feed(text)
    assert not page.open
    assert not {"link", "img", "iframe"} & {tag for tag, _ in page.found}
    assert not [attrs for _, attrs in page.found if {"src", "href"} & attrs.keys()]
    assert sum("pair" in (attrs.get("class") or "") for _, attrs in page.found) == num_pieces
    ops = {attrs.get("data-name") for _, attrs in page.found if "data-name" in attrs}
    arcs = [attrs for tag, attrs in page.found if tag == "path"]
    assert arcs and all({arc["data-from"], arc["data-to"]} <= ops for arc in arcs)
    groups = {attrs["data-group"] for _, attrs in page.found if "data-group" in attrs}
    assert len(groups) > 2


def test_a_receipt_that_cannot_be_read_is_said(entry: Entry) -> None:
    broken = Entry(entry.folder, entry.manifest, {**entry.files, GRAPHS: b"{"})
    with pytest.raises(Damaged, match="its receipts cannot be read"):
        explanation_of(broken)


def test_what_cannot_be_explained_or_written(
    tiny_model: str, tiny_cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="-O0 compiles nothing"):
        explain(tiny_config(tiny_model, level=0), as_json=False, html=None)
    config = tiny_config(tiny_model, cache_dir=str(tiny_cache))
    with pytest.raises(ConfigError, match="there is no folder"):
        explain(config, as_json=False, html=str(tmp_path / "no" / "page.html"))


def test_places_in_short() -> None:
    places = ["a.py:9 > b.py:4", "a.py:9 > b.py:12", "c.py:1"]
    assert places_in_short(places) == "a.py:9 > b.py:4,12, c.py:1"
    assert places_in_short(places, 1) == "a.py:9 > b.py:4,12, and 1 more"
    assert places_in_short([]) == ""


def test_what_is_in_the_cache_is_compiled_once_more_for_a_dump(
    tiny_model: str, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere: the entry stays, and what is compiled for the graphs does not."""
    jobs: list[CompileJob] = []

    class Child:
        def __init__(self, job: CompileJob) -> None:
            jobs.append(job)

        def wait(self, progress: object) -> CompileFailed:
            return CompileFailed("not here")

        def close(self) -> None: ...

    monkeypatch.setattr(warmup, "CompileChild", Child)
    options = {"cache_dir": str(tiny_cache), "dump_passes": str(tmp_path / "dump")}
    assert explain(tiny_config(tiny_model, **options), as_json=False, html=None) == 1
    (job,) = jobs
    assert job.config.compile.dump_passes == options["dump_passes"]
    assert job.root != str(tiny_cache) and not Path(job.root).exists()
    assert (tmp_path / "dump").is_dir() and CompileCache(tiny_cache).entry_folders()
    with pytest.raises(ConfigError, match="--dump-passes /dev/null/dump"):
        config = tiny_config(tiny_model, **options | {"dump_passes": "/dev/null/dump"})
        explain(config, as_json=False, html=None)
