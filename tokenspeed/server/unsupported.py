"""Fields that clients send and that cannot be honoured here: refused, never dropped."""

from __future__ import annotations

from typing import Any

from tokenspeed.server.errors import unsupported

_TOOLS = "only /v1/chat/completions has tools"
_OLD_TOOLS = "send tools and tool_choice"
_BEAMS = "this server samples; it has no beam search"
_TEXT_ONLY = "text is the only output"

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _TOOLS),
    "tool_choice": (("none",), _TOOLS),
    "functions": (([],), _OLD_TOOLS),
    "function_call": (("none",), _OLD_TOOLS),
    "suffix": (("",), "the models here complete text at its end only"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "prediction": ((), "predicted outputs are not used"),
    "web_search_options": ((), "this server fetches nothing"),
    "reasoning_effort": ((), "only /v1/chat/completions tells reasoning from the answer"),
    "verbosity": ((), "the models here have no verbosity levels"),
    "chat_template": ((), "the template is chosen when the server starts"),
    "documents": ((), "put the documents into the messages"),
    "allowed_token_ids": ((), "use logit_bias"),
    "bad_words": ((), "use logit_bias"),
    "logits_processors": ((), "this server runs no code of a request"),
    "truncate_prompt_tokens": ((), "cut the prompt before it is sent"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "spaces_between_special_tokens": ((True,), "special tokens are joined as the tokenizer does"),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1, 1.0), _BEAMS),
    "priority": ((0,), "requests are served in the order in which they come"),
    "request_id": ((), "send the header X-Request-Id"),
}
"""The values that ask for nothing (null always does), and why any other is refused."""


def refuse_unless_harmless(name: str, value: Any) -> None:
    """Raise APIError if `value` asks for something. A bool is no number: true is not 1."""
    harmless, why = UNSUPPORTED[name]
    if value is None or any(type(value) is type(each) and value == each for each in harmless):
        return
    raise unsupported(name, why)
