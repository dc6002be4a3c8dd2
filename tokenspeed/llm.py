"""The offline face: `LLM(model).generate(prompts)`, with the engine in this process.

    llm = LLM("smollm2", max_model_len=2048)
    for output in llm.chat([{"role": "user", "content": "Hello"}]):
        print(output.outputs[0].text)

Results come in the order of the prompts. A request without a seed gets one from the engine's `seed`
option and a counter, so that a program run again gives the same tokens.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import msgspec
from tqdm import tqdm

from tokenspeed.config import unwatched
from tokenspeed.engine.build import build_engine
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.frozen import freeze_for, thaw
from tokenspeed.engine.interrupts import hold_interrupts
from tokenspeed.keywords import config_of
from tokenspeed.log import logger
from tokenspeed.outputs import CompletionOutput, RequestOutput
from tokenspeed.parsers.answer_events import AnswerEvents, message_of
from tokenspeed.parsers.chat_plan import Chat, plan_chat
from tokenspeed.parsers.parser import OutputParser
from tokenspeed.progress import Progress
from tokenspeed.prompts import Message, Prompt, as_conversations, as_prompts
from tokenspeed.request import (
    MAX_SEED,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    check_priority,
    params_of_samples,
)
from tokenspeed.text.bad_words import with_bad_tokens
from tokenspeed.text.output import OutputText, Sample
from tokenspeed.text.text_side import load_text_side
from tokenspeed.text.tokenizer import Tokenizer


class LLM:
    """A model, ready to generate: smollm2 if none is named. Options are those of `tokenspeed
    serve`, with underscores, except the server's own; names of other engines get the answers of
    `serve --help=compat`. Not thread-safe. Free it with `close`, or use it in a `with` block.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = unwatched(config_of(model, options))
        self._text = load_text_side(self.config.model)
        self._engine: Engine | None = build_engine(self.config, _log_progress)
        freeze_for(self._engine)
        self._counter = itertools.count()

    @property
    def max_model_len(self) -> int:
        """Most tokens that prompt and output may have together."""
        return self.engine.ready.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; InvalidRequest under `skip_tokenizer_init`."""
        if self._text.tokenizer is None:
            raise InvalidRequest("text needs a tokenizer, but skip_tokenizer_init is set", "prompt")
        return self._text.tokenizer

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def default_sampling_params(self) -> SamplingParams:
        """What `generate` takes if nothing is given: the model's own defaults."""
        return SamplingParams(**cast(Any, self._text.defaults))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several, each a text or a list of token ids.

        `sampling_params` are for all prompts or one for each. The progress bar is shown on a
        terminal, or as `use_tqdm` says. `priority` has one number for each prompt: lower ones are
        served first, under the option `scheduling_policy="priority"`. Raises InvalidRequest before
        anything runs.
        """
        several = as_prompts(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        ids = [
            self.tokenizer.encode(prompt)
            if isinstance(prompt, str)
            else [*map(operator.index, prompt)]
            for prompt in several
        ]
        params = self._params(sampling_params, len(ids))
        priorities = self._priorities(priority, len(ids))
        return self._generate(texts, ids, params, [_PLAIN] * len(ids), use_tqdm, priorities)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. With `continue_final_message` the last message is
        continued instead (and `add_generation_prompt` must be false).

        Answers are taken apart as the server does it: reasoning, content and calls of `tools` are
        in `outputs[i].message`, whose dict goes into the conversation. `tool_choice` and
        `parallel_tool_calls` mean what they mean in OpenAI's API.
        """
        chats = [
            Chat(
                messages=conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                chat_template_kwargs=chat_template_kwargs or {},
            )
            for conversation in as_conversations(messages)
        ]
        plans = [plan_chat(self.config.output, self._text, chat) for chat in chats]
        prompts = [plan.render(self._text) for plan in plans]
        params, readings = [], []
        for plan, (text, _), each in zip(
            plans, prompts, self._params(sampling_params, len(plans)), strict=True
        ):
            held = plan.held_to(each.structured_outputs)
            held, is_open = plan.start(text, held, self.tokenizer)
            params.append(msgspec.structs.replace(each, structured_outputs=held))
            kept = self.tokenizer.special_ids(plan.form.markers)
            readings.append(_Reading(plan.parser(is_open), kept, not parallel_tool_calls))
        self._check_grammars(params)
        texts, ids = [text for text, _ in prompts], [each for _, each in prompts]
        return self._generate(texts, ids, params, readings, use_tqdm, [0] * len(ids))

    def close(self) -> None:
        """Let go of the model and its memory. May be called again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            thaw(engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """One for each prompt."""
        if given is None:
            given = self.default_sampling_params()
        params = [given] * count if isinstance(given, SamplingParams) else list(given)
        if not all(isinstance(each, SamplingParams) for each in params):
            raise TypeError(
                "sampling_params is a SamplingParams, or a list with one for each prompt"
            )
        if len(params) != count:
            raise InvalidRequest(f"{len(params)} sampling_params for {count} prompts")
        if self._text.tokenizer is None and any(each.stop for each in params):
            raise InvalidRequest("stop strings need a tokenizer, but skip_tokenizer_init is set")
        self._check_grammars(params)
        return [with_bad_tokens(each, self._text.tokenizer) for each in params]

    def _check_grammars(self, params: Sequence[SamplingParams]) -> None:
        for asked in {each.structured_outputs for each in params if each.structured_outputs}:
            self.engine.check_grammar(asked)

    def _priorities(self, given: Sequence[int] | None, count: int) -> list[int]:
        """One for each prompt."""
        priorities = [0] * count if given is None else [*map(operator.index, given)]
        if len(priorities) != count:
            raise InvalidRequest(f"{len(priorities)} priorities for {count} prompts", "priority")
        for priority in priorities:
            check_priority(priority, self.config.scheduler.scheduling_policy)
        return priorities

    def _generate(
        self,
        texts: Sequence[str | None],
        prompts: list[list[int]],
        params: list[SamplingParams],
        readings: list[_Reading],
        use_tqdm: bool | None,
        priorities: Sequence[int],
    ) -> list[RequestOutput]:
        groups = [self._requests(*each) for each in zip(prompts, params, priorities, strict=True)]
        requests = [request for group in groups for request in group]
        samples = {each.id: Sample() for each in requests}
        kept = {
            each.id: reading.kept_ids
            for group, reading in zip(groups, readings, strict=True)
            for each in group
        }
        outputs = {
            each.id: OutputText(self._text.tokenizer, each, kept[each.id]) for each in requests
        }
        hidden = None if use_tqdm is None else not use_tqdm  # None: unless on a terminal
        with tqdm(total=len(groups), desc="Processed prompts", disable=hidden) as bar:
            self._run(requests, samples, outputs, Progress(bar, groups))
        return [
            _output(text, group, [samples[request.id] for request in group], reading)
            for text, group, reading in zip(texts, groups, readings, strict=True)
        ]

    def _requests(
        self, prompt_ids: list[int], params: SamplingParams, priority: int
    ) -> list[GenerateRequest]:
        """The sequences of one prompt."""
        number = next(self._counter)
        seed = params.seed
        if seed is None:
            seed = (self.config.model.seed + number) & MAX_SEED
        return [
            GenerateRequest(
                id=f"{number}-{index}",
                prompt_ids=prompt_ids,
                params=each,
                seed=seed,
                sample_index=index,
                priority=priority,
            )
            for index, each in enumerate(params_of_samples(params, params.n))
        ]

    def _run(
        self,
        requests: list[GenerateRequest],
        samples: dict[str, Sample],
        outputs: dict[str, OutputText],
        progress: Progress,
    ) -> None:
        """Run until all have ended. Nothing is left in the engine, however this ends: Ctrl-C waits
        for the end of a step. A second one does not, and closes.
        """
        engine = self.engine
        with hold_interrupts() as interrupts:
            try:
                for request in requests:
                    engine.add(request)
                while engine.has_work:
                    for delta in engine.step():
                        sample = samples[delta.request_id]
                        if sample.finish_reason is not None:
                            continue  # a stop string has ended it, and the engine did once more
                        new = outputs[delta.request_id].push(delta)
                        sample.push(new, delta)
                        if delta.error is not None:
                            logger.warning("request %s failed: %s", delta.request_id, delta.error)
                        if new.must_abort:
                            engine.abort([delta.request_id])
                        progress.add(delta, is_done=sample.finish_reason is not None)
                    interrupts.deliver()
            finally:
                if interrupts.is_forced:
                    self.close()
                else:
                    engine.abort(key for key, each in samples.items() if not each.finish_reason)
                    engine.step()  # what is in flight


@dataclass(frozen=True)
class _Reading:
    """How the outputs of one prompt are read; by itself, as plain text."""

    new_parser: Callable[[], OutputParser] | None = None
    kept_ids: frozenset[int] = frozenset()
    one_call: bool = False


_PLAIN = _Reading()


def _output(
    prompt: str | None,
    requests: list[GenerateRequest],
    samples: list[Sample],
    reading: _Reading,
) -> RequestOutput:
    outputs = []
    for index, (request, sample) in enumerate(zip(requests, samples, strict=True)):
        assert sample.finish_reason is not None, f"request {request.id} has no end"
        parser = reading.new_parser() if reading.new_parser else None
        answer = AnswerEvents(parser, one_call=reading.one_call)
        events = answer.push(sample.text, is_last=True)
        outputs.append(
            CompletionOutput(
                index=index,
                text=sample.text,
                token_ids=sample.token_ids,
                finish_reason=answer.finish_reason(sample.finish_reason.value),
                stop_reason=sample.stop_reason,
                logprobs=sample.logprobs if request.params.logprobs is not None else None,
                message=message_of(events),
                error=sample.error,
            )
        )
    scores = samples[0].prompt_logprobs
    return RequestOutput(
        request_id=requests[0].id,
        prompt=prompt,
        prompt_token_ids=requests[0].prompt_ids,
        outputs=outputs,
        prompt_logprobs=None if scores is None else list(scores),
        num_cached_tokens=samples[0].num_cached_tokens,
    )


def _log_progress(phase: str, detail: str) -> None:
    logger.debug("loading: %s %s", phase, detail)
