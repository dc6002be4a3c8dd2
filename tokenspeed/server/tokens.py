"""What prompts are made of: /tokenize and /detokenize, and the render routes, which take a whole
request and show the prompt that it would have. Nothing is generated.
"""

from __future__ import annotations

from tokenspeed.request import SamplingParams
from tokenspeed.server import chat, completions
from tokenspeed.server.errors import bad_request
from tokenspeed.server.job import Prompt, fit_prompts, offload, require_tokenizer
from tokenspeed.server.logprobs import token_text
from tokenspeed.server.protocol import SamplingFields
from tokenspeed.server.protocol_chat import ChatRequest
from tokenspeed.server.protocol_completions import DEFAULT_MAX_TOKENS, CompletionRequest
from tokenspeed.server.protocol_tokens import (
    DetokenizeRequest,
    RenderedPrompt,
    RenderedPrompts,
    Text,
    TokenizeRequest,
    Tokens,
)
from tokenspeed.server.state import ServerState
from tokenspeed.text.tokenizer import Tokenizer


async def tokenize(state: ServerState, request: TokenizeRequest) -> Tokens:
    """Raises APIError or InvalidRequest."""
    ready, text = state.require_ready()
    state.model_name(request.model)
    tokenizer = require_tokenizer(text, "prompt")
    if request.messages is not None:
        names = (
            *("model", "messages", "tools", "add_special_tokens", "add_generation_prompt"),
            *("continue_final_message", "chat_template_kwargs"),
        )
        made = ChatRequest(**{name: getattr(request, name) for name in names})
        made.check()
        ids = (await chat.prompt(state, made)).ids
    else:
        special = request.add_special_tokens is not False
        ids = await offload(state, "prompt", tokenizer.encode, request.given_text, special)
    texts = None
    if request.return_token_strs:
        texts = await offload(state, "return_token_strs", _texts, tokenizer, ids)
    return Tokens(count=len(ids), max_model_len=ready.max_model_len, tokens=ids, token_strs=texts)


def _texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [token_text(tokenizer, id)[0] for id in ids]


async def detokenize(state: ServerState, request: DetokenizeRequest) -> Text:
    """Special tokens are shown. Raises APIError."""
    ready, text = state.require_ready()
    state.model_name(request.model)
    tokenizer = require_tokenizer(text, "tokens")
    size = ready.vocab_size
    return Text(await offload(state, "tokens", _decode, tokenizer, request.tokens, size))


def _decode(tokenizer: Tokenizer, ids: list[int], vocab_size: int) -> str:
    if any(not 0 <= id < vocab_size for id in ids):
        raise bad_request(
            f"tokens holds ids outside the vocabulary of {vocab_size} tokens", "tokens"
        )
    return tokenizer.decode(ids, skip_special_tokens=False)


async def render_chat(state: ServerState, request: ChatRequest) -> RenderedPrompts:
    """Raises APIError or InvalidRequest."""
    prompts = [await chat.prompt(state, request)]
    _, text = state.require_ready()
    params = chat.sampling_params(text, request)
    return await _rendered(state, request, params, prompts, "messages", None)


async def render_completion(state: ServerState, request: CompletionRequest) -> RenderedPrompts:
    """Raises APIError or InvalidRequest."""
    prompts = await completions.prompts(state, request)
    _, text = state.require_ready()
    params = completions.sampling_params(text, request)
    return await _rendered(state, request, params, prompts, "prompt", DEFAULT_MAX_TOKENS)


async def _rendered(
    state: ServerState,
    request: SamplingFields,
    params: SamplingParams,
    prompts: list[Prompt],
    field: str,
    default_max_tokens: int | None,
) -> RenderedPrompts:
    ready, text = state.require_ready()
    fitted, _ = fit_prompts(
        *(ready, request, params, prompts),
        prompt_field=field,
        default_max_tokens=default_max_tokens,
    )
    shown = []
    for whole, prompt in zip(prompts, fitted, strict=True):
        left = prompt.text
        if whole.text is not None and left is None:
            tokenizer = require_tokenizer(text, field)
            left = await offload(state, field, _decode, tokenizer, prompt.ids, ready.vocab_size)
        shown.append(RenderedPrompt(left, prompt.ids))
    return RenderedPrompts(model=state.model_name(request.model), prompts=shown)
