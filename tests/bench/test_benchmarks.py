"""What the scripts in benchmarks/ compute themselves: ratios, delays, choices. None is run."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tokenspeed.bench.answer import Record

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)


def test_ratios_are_above_one_where_we_are_faster() -> None:
    engine = script("gpu_engine")
    assert engine.ratio(engine.WORKLOADS["decode8"], 2.0, 3.0) == 1.5
    assert engine.ratio(engine.WORKLOADS["prefill"], 300.0, 200.0) == 1.5
    for figures in engine.PEER.values():
        assert figures.keys() == engine.WORKLOADS.keys()


def test_a_card_is_normalised_by_what_a_workload_asks_of_it() -> None:
    engine = script("gpu_engine")
    card = {"copy_tb_s": 4.3 * 0.81, "matmul_tflop_s": 790.0}
    assert engine.card_share("decode1", card) == pytest.approx(0.81)
    assert engine.card_share("prefill", card) == 1.0
    assert engine.card_share("mixed", card) == pytest.approx(0.9)
    assert not engine.is_usual(card)
    assert engine.is_usual({"copy_tb_s": 4.2, "matmul_tflop_s": 799.0})


def test_delays_join_the_engines_tokens_with_the_clients_chunks() -> None:
    streams = script("http_streams")
    record = Record(
        session=0,
        turn=0,
        start=1.0,
        input_len=1,
        max_tokens=3,
        response_id="cmpl-a",
        chunk_times=[0.5, 0.75],
        chunk_tokens=[1, 2],
    )
    # On the common clock: read at 11.5, 11.75, 11.75.
    sends = [(11.25, "cmpl-a-0", 1), (11.5, "cmpl-b-0", 9), (11.5, "cmpl-a-0", 2)]
    assert streams.delays_ms([(10.0, record)], sends).tolist() == [250.0, 250.0, 250.0]
    with pytest.raises(SystemExit, match="sent 1 tokens"):
        streams.delays_ms([(10.0, record)], sends[:1])


def test_passes_are_those_of_the_device_or_those_named() -> None:
    passes = script("passes")
    assert "weight_layout" in passes.candidates("cpu", "")
    assert "weight_layout" not in passes.candidates("cuda", "")
    assert not passes.LEFT_IN & set(passes.candidates("cpu", ""))
    assert passes.candidates("cuda", "rope") == ["rope"]
    with pytest.raises(SystemExit, match="no pass nothing"):
        passes.candidates("cpu", "nothing,rope")


def test_a_folder_without_tokenizer_is_served_without_one(tiny_model: str) -> None:
    burst = script("burst")
    parser = argparse.ArgumentParser()
    burst.add_server_options(parser)
    args = parser.parse_args(["--model", tiny_model, "--option", "level=0", "--option", "a=true"])
    settings = burst.settings_of(args)
    assert settings["skip_tokenizer_init"] is True
    assert (settings["level"], settings["a"]) == (0, True)
    assert "skip_tokenizer_init" not in burst.settings_of(parser.parse_args([]))


def test_peers_without_vllm_say_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match="needs vLLM") as error:
        script("peers_vllm")
    assert "\n" not in str(error.value)


def test_a_light_reader_knows_when_each_token_came() -> None:
    """An event counts when its last byte is there; the role's empty text is no token."""
    reading = script("http_side").Reading()
    first = b'5f\r\ndata: {"delta":{"role":"assistant","content":""}}\n\n'
    for at, data in ((1.0, first), (2.0, b'{"content":" the'), (3.0, b'word"}{"content":"last"}')):
        reading.data += data
        reading.times.append(at)
        reading.ends.append(len(reading.data))
    assert reading.tokens() == [3.0, 3.0, 3.0]


def test_the_document_has_the_table_that_was_measured() -> None:
    threads = script("cpu_threads")
    report = json.loads((FOLDER / "results" / "cpu_threads.json").read_text())
    assert report["ms_a_token"].keys() == threads.SETTINGS.keys()
    table = threads.table(report["ms_a_token"])
    assert f"\n\n{table}\n\n" in (FOLDER.parent / "docs" / "launching.md").read_text()
    assert table.splitlines()[2].startswith("| as it is | ")
