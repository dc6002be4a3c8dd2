"""The offline face: `LLM(model).generate(prompts)`, with the engine in this process.

    llm = LLM("smollm2", max_model_len=2048)
    for output in llm.chat([{"role": "user", "content": "Hello"}]):
        print(output.outputs[0].text)

Results come in the order of the prompts. A request without a seed gets one from the engine's `seed`
option and a counter, so that a program run again gives the same tokens.
"""

from __future__ import annotations

import gc
import itertools
import operator
import time
from collections.abc import Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, Self, cast

import msgspec
from tqdm import tqdm

from tokenspeed.config import GROUPS, OPTIONS, Config, make_config
from tokenspeed.engine.build import build_engine
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.interrupts import hold_interrupts
from tokenspeed.log import logger
from tokenspeed.options import options_of, suggest
from tokenspeed.outputs import CompletionOutput, RequestOutput
from tokenspeed.request import (
    MAX_SEED,
    GenerateRequest,
    InvalidRequest,
    RequestDelta,
    SamplingParams,
)
from tokenspeed.text.bad_words import with_bad_tokens
from tokenspeed.text.output import OutputText, Sample
from tokenspeed.text.text_side import load_text_side
from tokenspeed.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = dict[str, Any]

_BAR_S = 0.2
"""How often the speeds beside the progress bar change."""


class LLM:
    """A model, ready to generate. Options are those of `tokenspeed serve`, with underscores, except
    the server's own. Not thread-safe. Free it with `close`, or use it in a `with` block.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self.config = _configure(model, options)
        self._text = load_text_side(self.config.model)
        self._engine: Engine | None = build_engine(self.config, _log_progress)
        gc.freeze()  # a collection that walks all that is here now takes 0.3 s, between two steps
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
    ) -> list[RequestOutput]:
        """Complete one prompt or several, each a text or a list of token ids.

        `sampling_params` are for all prompts or one for each. The progress bar is shown on a
        terminal, or as `use_tqdm` says. Raises InvalidRequest before anything runs.
        """
        several = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        ids = [
            self.tokenizer.encode(prompt)
            if isinstance(prompt, str)
            else [*map(operator.index, prompt)]
            for prompt in several
        ]
        return self._generate(texts, ids, self._params(sampling_params, len(ids)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. With `continue_final_message` the last message is
        continued instead (and `add_generation_prompt` must be false).
        """
        if not _is_list(messages):
            raise TypeError(f"messages are a list of dicts, not {type(messages).__name__}")
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations = cast(list[list[Message]], [messages] if is_one else messages)
        prompts = [
            self._text.chat_prompt(
                list(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        texts, ids = [text for text, _ in prompts], [each for _, each in prompts]
        return self._generate(texts, ids, self._params(sampling_params, len(ids)), use_tqdm)

    def close(self) -> None:
        """Let go of the model and its memory. May be called again."""
        self._engine = None
        gc.unfreeze()

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
        for asked in {each.structured_outputs for each in params if each.structured_outputs}:
            self.engine.check_grammar(asked)
        return [with_bad_tokens(each, self._text.tokenizer) for each in params]

    def _generate(
        self,
        texts: Sequence[str | None],
        prompts: list[list[int]],
        params: list[SamplingParams],
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        groups = [self._requests(ids, each) for ids, each in zip(prompts, params, strict=True)]
        requests = [request for group in groups for request in group]
        samples = {each.id: Sample() for each in requests}
        hidden = None if use_tqdm is None else not use_tqdm  # None: unless on a terminal
        with tqdm(total=len(groups), desc="Processed prompts", disable=hidden) as bar:
            self._run(requests, samples, _Bar(bar, groups))
        return [
            _output(text, group, [samples[request.id] for request in group])
            for text, group in zip(texts, groups, strict=True)
        ]

    def _requests(self, prompt_ids: list[int], params: SamplingParams) -> list[GenerateRequest]:
        """The sequences of one prompt. Only the first scores it: the prompt's log-probabilities are
        those of all its samples.
        """
        number = next(self._counter)
        seed = params.seed
        if seed is None:
            seed = (self.config.model.seed + number) & MAX_SEED
        unscored = msgspec.structs.replace(params, prompt_logprobs=None)
        return [
            GenerateRequest(
                id=f"{number}-{index}",
                prompt_ids=prompt_ids,
                params=unscored if index else params,
                seed=seed,
                sample_index=index,
            )
            for index in range(params.n)
        ]

    def _run(self, requests: list[GenerateRequest], samples: dict[str, Sample], bar: _Bar) -> None:
        """Run until all have ended. Nothing is left in the engine, however this ends: Ctrl-C waits
        for the end of a step. A second one does not, and closes.
        """
        engine = self.engine
        outputs = {each.id: OutputText(self._text.tokenizer, each) for each in requests}
        with hold_interrupts() as interrupts:
            try:
                for request in requests:
                    engine.add(request)
                while engine.has_work:
                    for delta in engine.step():
                        sample = samples[delta.request_id]
                        new = outputs[delta.request_id].push(delta)
                        sample.push(new, delta)
                        if delta.error is not None:
                            logger.warning("request %s failed: %s", delta.request_id, delta.error)
                        if new.must_abort:
                            engine.abort([delta.request_id])
                        bar.add(delta, sample)
                    interrupts.deliver()
            finally:
                if interrupts.is_forced:
                    self.close()
                else:
                    engine.abort(key for key, each in samples.items() if not each.finish_reason)
                    engine.step()  # what is in flight


class _Bar:
    """The progress bar: prompts that are done, and tokens a second in and out so far."""

    def __init__(self, bar: tqdm[Any], requests: Sequence[Sequence[GenerateRequest]]) -> None:
        self._bar = bar
        self._group_of = {each.id: group for group in requests for each in group}
        self._num_open = {id(group): len(group) for group in requests}
        self._began = self._shown = time.monotonic()
        self._num_in = 0
        self._num_out = 0

    def add(self, delta: RequestDelta, sample: Sample) -> None:
        group = self._group_of[delta.request_id]
        if len(sample.token_ids) == len(delta.token_ids):  # its first
            self._num_in += len(group[0].prompt_ids)
        self._num_out += len(delta.token_ids)
        now = time.monotonic()
        if now - self._shown > _BAR_S:
            self._shown = now
            seconds = now - self._began
            self._bar.set_postfix_str(
                f"in: {self._num_in / seconds:.0f} tok/s, out: {self._num_out / seconds:.0f} tok/s"
            )
        if sample.finish_reason is not None:
            self._num_open[id(group)] -= 1
            self._bar.update(self._num_open[id(group)] == 0)


def _output(
    prompt: str | None, requests: list[GenerateRequest], samples: list[Sample]
) -> RequestOutput:
    outputs = []
    for index, (request, sample) in enumerate(zip(requests, samples, strict=True)):
        assert sample.finish_reason is not None, f"request {request.id} has no end"
        outputs.append(
            CompletionOutput(
                index=index,
                text=sample.text,
                token_ids=sample.token_ids,
                finish_reason=sample.finish_reason.value,
                stop_reason=sample.stop_reason,
                logprobs=sample.logprobs if request.params.logprobs is not None else None,
            )
        )
    return RequestOutput(
        request_id=requests[0].id,
        prompt=prompt,
        prompt_token_ids=requests[0].prompt_ids,
        outputs=outputs,
        prompt_logprobs=samples[0].prompt_logprobs,
        num_cached_tokens=samples[0].num_cached_tokens,
    )


def _configure(model: str, options: dict[str, Any]) -> Config:
    """Settings from keywords; TypeError for an unknown name, ConfigError for a bad value."""
    server = {each.name for each in options_of(GROUPS["server"])}
    known = OPTIONS.keys() - server
    for name in options:
        if name in server:
            raise TypeError(f"LLM() takes no option {name!r}: it is the server's")
        if name not in known:
            raise TypeError(f"LLM() takes no option {name!r}{suggest(name, known)}")
    values = {"model": model, **options}
    return make_config(
        {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    )


def _log_progress(phase: str, detail: str) -> None:
    logger.debug("loading: %s %s", phase, detail)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; TypeError for what is neither a text nor token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise TypeError(f"prompts are texts or lists of token ids, not {type(prompts).__name__}")
    if len(prompts) and all(_is_token(each) for each in prompts):
        return [cast(Sequence[int], prompts)]
    for each in prompts:
        if not isinstance(each, str) and not _is_token_list(each):
            raise TypeError(f"a prompt is a text or a list of token ids, not {each!r:.60}")
    return list(cast(Sequence[Prompt], prompts))


def _is_list(value: object) -> bool:
    """A list or tuple, or an array: not what iterates over keys, bytes or in no order."""
    return isinstance(value, list | tuple) or hasattr(value, "__array__")


def _is_token_list(value: Any) -> bool:
    # Types first: that settles nearly all prompts, in less than half the time.
    return _is_list(value) and (set(map(type, value)) == {int} or all(map(_is_token, value)))


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
