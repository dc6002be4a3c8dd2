"""`LLM` as a user meets it: shapes of arguments, order, samples, seeds, stops, errors, progress."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tokenspeed
from tokenspeed import LLM, SamplingParams
from tokenspeed.constraint import MAX_GRAMMAR_CHARS, StructuredOutputs
from tokenspeed.options import ConfigError
from tokenspeed.request import InvalidRequest, RequestDelta
from tokenspeed.text.output import Sample, TextDelta

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def tiny_llm(folder: str, **options: Any) -> LLM:
    values = {"skip_tokenizer_init": True, "device": "cpu", "max_total_tokens": 1024}
    return LLM(folder, **values | options)


@pytest.fixture(scope="module")
def tiny(tiny_model: str) -> LLM:
    return tiny_llm(tiny_model)


def ids(outputs: list[Any]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def test_exports_are_lazy_and_complete() -> None:
    assert tokenspeed.LLM is LLM and tokenspeed.SamplingParams is SamplingParams
    assert set(tokenspeed.__all__) == {"LLM", "SamplingParams", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = tokenspeed.LMM


def test_prompts_one_or_many_in_order(tiny: LLM) -> None:
    prompts = [[5, 6], [7], [9] * 40, (8, 3), np.array([4, 2])]
    together = tiny.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in together] == [list(each) for each in prompts]
    assert ids(together) == [ids(tiny.generate(each, GREEDY))[0] for each in prompts]
    assert tiny.generate([], GREEDY) == []
    each = [SamplingParams(temperature=0.0, max_tokens=count) for count in (1, 2, 3, 4, 5)]
    assert [len(one[0]) for one in ids(tiny.generate(prompts, each))] == [1, 2, 3, 4, 5]


def test_samples_differ_and_repeat_by_seed(tiny: LLM, tiny_model: str) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=10, prompt_logprobs=1, logprobs=0)
    (first,), (again,) = tiny.generate([5, 6], params), tiny.generate([5, 6], params)
    assert [sample.index for sample in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in first.outputs}) == 4
    assert ids([first]) == ids([again])
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 2
    sample = first.outputs[0]
    assert sample.logprobs is not None
    total = sum(entry.logprob for entry in sample.logprobs)
    assert sample.cumulative_logprob == pytest.approx(total)


def test_unseeded_requests_repeat_from_run_to_run(tiny_model: str) -> None:
    params = SamplingParams(max_tokens=10)
    runs = [tiny_llm(tiny_model, seed=seed) for seed in (1, 1, 2)]
    found = [ids(llm.generate([[5, 6], [5, 6]], params)) for llm in runs]
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1], "two requests do not share a seed"


def test_invalid_requests_are_refused_before_anything_runs(tiny: LLM) -> None:
    steps = tiny.engine.stats.steps
    for prompts, params, message in [
        ([[5], []], GREEDY, "empty"),
        ([[5], [999]], GREEDY, "vocabulary"),
        ([[5] * 300], GREEDY, "maximum context length is 256"),
        (["text"], GREEDY, "tokenizer"),
        ([[5], [6]], [GREEDY], "1 sampling_params for 2 prompts"),
        ([[5]], SamplingParams(stop=("x",)), "stop strings need a tokenizer"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            tiny.generate(prompts, params)
    bad: Any
    for bad in ([[5.0]], {"prompt": "Hi"}, b"ab", {5, 6}, [True], [[5], {"prompt": "Hi"}], 5):
        with pytest.raises(TypeError, match="token ids"):
            tiny.generate(bad, GREEDY)
    for bad in (3, [1.0, 2], [[1.5]], [True, False], [[[5]]], np.zeros((2, 40, 40))):
        with pytest.raises(TypeError, match=r"texts? or .* token ids, not ") as caught:
            tiny.generate(np.array(bad), GREEDY)
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="sampling_params is a SamplingParams"):
        tiny.generate([[5]], {"temperature": 0})  # type: ignore[arg-type]
    for bad in ({"role": "user", "content": "hi"}, "hi", np.array(3), ["hi"], [5], [[], 5]):
        with pytest.raises(TypeError, match="list of dicts"):
            tiny.chat(bad)
    with pytest.raises(InvalidRequest, match="no chat template"):
        tiny.chat([{"role": "user", "content": "hi"}])
    assert tiny.engine.stats.steps == steps and not tiny.engine.has_work


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize(
    "where", ["worker.Worker.launch", "worker.Step.result", "scheduler.Scheduler.commit"]
)
def test_an_interrupted_run_leaves_nothing(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, where: str, overlap: bool
) -> None:
    llm = tiny_llm(tiny_model, disable_overlap_schedule=not overlap)
    expected = ids(llm.generate([[5, 6], [7]], GREEDY))
    module, kind, name = where.split(".")
    owner = getattr(importlib.import_module(f"tokenspeed.engine.{module}"), kind)
    real, calls = getattr(owner, name), itertools.count()

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7]], GREEDY)
    assert next(calls) < 8, "it waits for the end of its step, not of the run"
    assert not llm.engine.has_work
    llm.engine.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ids(llm.generate([[5, 6], [7]], GREEDY)) == expected


def test_what_raises_outside_the_engine_leaves_nothing(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bar: Any, *arguments: Any, **options: Any) -> None:
        raise OSError("no terminal")

    with monkeypatch.context() as patch:
        patch.setattr("tokenspeed.llm.Progress.add", fail)
        with pytest.raises(OSError, match="no terminal"):
            tiny.generate([[5, 6], [7]], GREEDY)
    assert not tiny.engine.has_work
    tiny.engine.check()


def test_a_second_interrupt_does_not_wait(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, reached = tiny_llm(tiny_model), []

    def hang(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)

    monkeypatch.setattr("tokenspeed.engine.worker.Worker.launch", hang)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]], GREEDY)
    assert reached == [1]
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[5, 6]], GREEDY)


def test_runs_in_other_threads_hold_nothing(tiny: LLM) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(tiny.generate([5, 6], GREEDY)))
    thread.start()
    thread.join()
    assert ids(found[0]) == ids(tiny.generate([5, 6], GREEDY))


def test_options_that_do_not_exist_or_cannot_be(tiny_model: str) -> None:
    with pytest.raises(TypeError, match="no option 'blok_size'; did you mean block_size"):
        tiny_llm(tiny_model, blok_size=3)
    with pytest.raises(TypeError, match="'port': it is the server's"):
        tiny_llm(tiny_model, port=80)
    for name in ("served_model_name", "max_queued_requests", "max_queued_tokens"):
        with pytest.raises(TypeError, match=f"'{name}': it is the server's"):
            tiny_llm(tiny_model, **{name: 1})
    with pytest.raises(ConfigError, match="block_size must be from 1"):
        tiny_llm(tiny_model, block_size=0)
    with pytest.raises(
        ConfigError, match=r"has room for 64 tokens, not for .* of --max-model-len 256"
    ):
        tiny_llm(tiny_model, max_model_len=256, max_total_tokens=64)
    assert tiny_llm(tiny_model, max_total_tokens=64).max_model_len == 64


def test_closing(tiny_model: str) -> None:
    with tiny_llm(tiny_model) as llm:
        assert llm.max_model_len == 256
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([5], GREEDY)


def test_generation_config_gives_the_defaults(tiny_model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    found = {"temperature": 0.0, "top_k": 20, "top_p": 0.9, "min_p": 7, "repetition_penalty": None}
    (folder / "generation_config.json").write_text(json.dumps(found))
    llm = tiny_llm(str(folder))
    assert llm.default_sampling_params() == SamplingParams(temperature=0.0, top_k=20, top_p=0.9)
    first, second = llm.generate([5, 6]), llm.generate([5, 6])
    assert ids(first) == ids(second), "greedy, as the file says"
    plain = tiny_llm(str(folder), generation_config="none")
    assert plain.default_sampling_params() == SamplingParams()


def test_the_bar_shows_speeds(tiny: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.generate([[5, 6]], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown and "in: " in shown and "out: " in shown
    tiny.generate([[5, 6]], GREEDY)
    tiny.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_texts_stop_strings_and_chats(smollm2: LLM) -> None:
    prompt = "1, 2, 3, 4, 5, 6, 7,"
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=(", 12",))
    free = SamplingParams(temperature=0.0, max_tokens=24)
    stopped, whole = smollm2.generate([prompt, prompt], [params, free])
    text = whole.outputs[0].text
    assert ", 12" in text
    assert stopped.outputs[0].text == text[: text.index(", 12")]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", ", 12")
    assert stopped.prompt == prompt
    assert whole.outputs[0].finish_reason == "length"
    assert len(stopped.outputs[0].token_ids) < len(whole.outputs[0].token_ids)
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (one,) = smollm2.chat(conversation, free)
    assert one.outputs[0].text == "The capital of France is Paris."
    assert [each.outputs for each in smollm2.chat([conversation] * 2, free)] == [one.outputs] * 2
    without = SamplingParams(temperature=0.0, max_tokens=9, bad_words=("Paris",))
    (other,) = smollm2.chat(conversation, without)
    assert other.outputs[0].text.startswith("The capital of France is")
    assert "Paris" not in other.outputs[0].text
    (more,) = smollm2.chat(
        [*conversation, {"role": "assistant", "content": "The capital of"}],
        free,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert more.outputs[0].text.startswith(" France")
    assert not smollm2.engine.has_work


def test_answers_of_chats_are_taken_apart(smollm2: LLM) -> None:
    """As the server does it: the tools' own template, a forced call, its result, and so on."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool: dict[str, Any]
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    chat: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Oslo?"}]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    for result in ("rain", "sun"):
        (answer,) = smollm2.chat(chat, params, tools=[tool], **forced)
        sample = answer.outputs[0]
        assert answer.prompt is not None and "<tools>" in answer.prompt
        assert sample.text.startswith("<tool_call>") and sample.finish_reason == "tool_calls"
        (call,) = sample.message.tool_calls
        assert call.name == "get_weather" and call.is_complete and not sample.message.content
        assert json.loads(call.arguments)["city"] in ("Oslo", "Paris")
        chat.append(sample.message.to_dict())
        chat.append({"role": "tool", "tool_call_id": call.id, "content": result})
    for max_tokens in (3, 9, 18):
        cut = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        sample = smollm2.chat(chat, cut, tools=[tool], **forced)[0].outputs[0]
        assert sample.text and sample.finish_reason == "length" and not sample.message.content
    form = StructuredOutputs(json={"enum": ["yes", "no"]})
    (one,), (two,) = (
        smollm2.generate("Is it?", params),
        smollm2.chat(chat, msgspec.structs.replace(params, structured_outputs=form), tools=[tool]),
    )
    assert one.outputs[0].message.content == one.outputs[0].text
    assert json.loads(two.outputs[0].message.content) in ("yes", "no")
    with pytest.raises(InvalidRequest, match="one of them"):
        smollm2.chat(
            chat, msgspec.structs.replace(params, structured_outputs=form), tools=[tool], **forced
        )
    with pytest.raises(InvalidRequest, match="tool_choice needs tools"):
        smollm2.chat(chat, params, tool_choice="required")
    tool["function"]["parameters"] = schema | {"description": "x" * MAX_GRAMMAR_CHARS}
    with pytest.raises(InvalidRequest, match=f"at most {MAX_GRAMMAR_CHARS}"):
        smollm2.chat(chat[:1], params, tools=[tool], **forced)
    with pytest.raises(InvalidRequest, match="does not read 'enable_thinking'"):
        smollm2.chat(chat[:1], params, chat_template_kwargs={"enable_thinking": True})


def test_reasoning_is_told_from_the_answer(smollm2: LLM) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    form = StructuredOutputs(regex="<think>ab</think>\n\ncd")
    params = SamplingParams(temperature=0.0, structured_outputs=form)
    llm = smollm2
    plain = llm.chat(chat, params)[0].outputs[0]
    assert plain.message.content == plain.text == "<think>ab</think>\n\ncd"
    config, output = llm.config, replace(llm.config.output, reasoning_parser="base")
    try:
        llm.config = replace(config, output=output)
        parsed = llm.chat(chat, params)[0].outputs[0]
    finally:
        llm.config = config
    assert (parsed.message.reasoning, parsed.message.content) == ("ab", "cd")
    assert parsed.text == plain.text and parsed.finish_reason == "stop"
    assert parsed.message.to_dict() == {
        "role": "assistant",
        "content": "cd",
        "reasoning_content": "ab",
    }


def test_lower_priorities_are_served_first(tiny: LLM, tiny_model: str) -> None:
    with tiny_llm(tiny_model, scheduling_policy="priority", max_num_seqs=1) as llm:
        ended: list[int] = []
        push = Sample.push

        def watched(sample: Sample, new: TextDelta, delta: RequestDelta) -> None:
            push(sample, new, delta)
            if delta.finish_reason is not None:
                ended.append(int(delta.request_id.partition("-")[0]))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sample, "push", watched)
            outputs = llm.generate([[5], [6], [7], [8]], GREEDY, priority=[3, -1, 3, 0])
        assert ended == [1, 3, 0, 2]
        assert ids(outputs) == ids(tiny.generate([[5], [6], [7], [8]], GREEDY))
        with pytest.raises(InvalidRequest, match="1 priorities for 2 prompts"):
            llm.generate([[5], [6]], GREEDY, priority=[1])
        with pytest.raises(InvalidRequest, match="priority must be from"):
            llm.generate([5], GREEDY, priority=[1 << 31])
    tiny.generate([5], GREEDY, priority=[0])
    with pytest.raises(InvalidRequest, match="scheduling-policy priority"):
        tiny.generate([5], GREEDY, priority=[1])
