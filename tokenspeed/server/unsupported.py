"""Fields that clients send and that cannot be honoured here: refused, never dropped."""

from __future__ import annotations

from typing import Any

from tokenspeed.server.errors import unsupported

_TOOLS = "only /v1/chat/completions has tools"
_OLD_TOOLS = "send tools and tool_choice"
_BEAMS = "this server samples; it has no beam search"
_TEXT_ONLY = "text is the only output"
_CHAT_ONLY = "only /v1/chat/completions takes it"
_ADAPTERS = "no adapters are loaded here"
_SAMPLERS = "temperature, top_p, top_k and min_p are the samplers here"

Unsupported = dict[str, tuple[tuple[Any, ...], str]]
"""The values that ask for nothing (null always does), and why any other is refused."""

UNSUPPORTED: Unsupported = {
    # OpenAI
    "tools": (([],), _TOOLS),
    "tool_choice": (("none",), _TOOLS),
    "parallel_tool_calls": ((True,), _TOOLS),
    "functions": (([],), _OLD_TOOLS),
    "function_call": (("none",), _OLD_TOOLS),
    "messages": ((), _CHAT_ONLY),
    "prompt": ((), "only /v1/completions takes it; send messages"),
    "echo": ((False,), "only /v1/completions repeats its prompt"),
    "top_logprobs": ((), "/v1/completions takes the number as logprobs"),
    "max_completion_tokens": ((), "/v1/completions calls it max_tokens"),
    "suffix": (("",), "the models here complete text at its end only"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "prediction": ((), "predicted outputs are not used"),
    "web_search_options": ((), "this server fetches nothing"),
    "reasoning_effort": ((), "only /v1/chat/completions tells reasoning from the answer"),
    "verbosity": ((), "the models here have no verbosity levels"),
    # vLLM
    "chat_template": ((), "the template is chosen when the server starts"),
    "chat_template_kwargs": (({},), _CHAT_ONLY),
    "add_generation_prompt": ((True,), _CHAT_ONLY),
    "continue_final_message": ((False,), _CHAT_ONLY),
    "documents": ((), "put the documents into the messages"),
    "logits_processors": ((), "this server runs no code of a request"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "spaces_between_special_tokens": ((True,), "special tokens are joined as the tokenizer does"),
    "detokenize": ((True,), "send return_token_ids; the text comes with them"),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1, 1.0), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "request_id": ((), "send the header X-Request-Id"),
    "include_reasoning": ((True,), "reasoning stands in a field of its own"),
    "thinking_token_budget": ((), "reasoning is not limited by itself; send max_tokens"),
    "return_tokens_as_token_ids": ((False,), "send return_token_ids"),
    "guided_whitespace_pattern": ((), "--disable-any-whitespace is the choice there is"),
    "guided_decoding_backend": ((), "llguidance compiles all grammars"),
    "kv_transfer_params": ((), "there is no KV transfer"),
    "mm_processor_kwargs": (({},), "the models here read text only"),
    "vllm_xargs": (({},), "there are no such arguments here"),
    # SGLang
    "rid": ((), "send the header X-Request-Id"),
    "extra_key": ((), "send cache_salt"),
    "lora_path": ((), _ADAPTERS),
    "lora_request": ((), _ADAPTERS),
    "custom_logit_processor": ((), "this server runs no code of a request"),
    "no_stop_trim": ((False,), "send include_stop_str_in_output"),
    "stop_regex": (([],), "stop takes plain strings"),
    "session_params": ((), "each request stands by itself"),
    "return_hidden_states": ((False,), "hidden states stay in the engine"),
    "separate_reasoning": ((True,), _CHAT_ONLY),
    "stream_reasoning": ((True,), "reasoning is streamed as it comes"),
    # llama.cpp and TGI
    "n_predict": ((), "send max_tokens"),
    "max_new_tokens": ((), "send max_tokens"),
    "n_probs": ((0,), "send logprobs"),
    "grammar": (("",), "send the grammar as ebnf"),
    "cache_prompt": ((True,), "prefixes are kept for all; cache_salt keeps one apart"),
    "repeat_penalty": ((1, 1.0), "send repetition_penalty"),
    "truncate": ((), "send truncate_prompt_tokens"),
    "num_beams": ((1,), _BEAMS),
    "do_sample": ((True,), "send temperature 0 for greedy output"),
    "watermark": ((False,), "there are no watermarks here"),
    "mirostat": ((0,), _SAMPLERS),
    "typical_p": ((1, 1.0), _SAMPLERS),
    "tfs_z": ((1, 1.0), _SAMPLERS),
    "top_a": ((0, 0.0), _SAMPLERS),
    "xtc_probability": ((0, 0.0), _SAMPLERS),
    "dry_multiplier": ((0, 0.0), _SAMPLERS),
}
"""Of the completions and chat APIs."""


def refuse_unless_harmless(name: str, value: Any, table: Unsupported) -> None:
    """Raise APIError if `value` asks for something. A bool is no number: true is not 1."""
    harmless, why = table[name]
    if value is None or any(type(value) is type(each) and value == each for each in harmless):
        return
    raise unsupported(name, why)
