"""Ask a running server a question through the `openai` client and print the answer as it comes.

    tokenspeed serve                       # in one terminal
    python examples/chat_client.py "What is gravity?"

Any key will do unless the server was started with --api-key; OPENAI_API_KEY is read if it is set.
"""

from __future__ import annotations

import argparse
import os
import time

import openai


def ask(
    client: openai.OpenAI, model: str, question: str, max_tokens: int, temperature: float = 0.0
) -> None:
    """Stream one answer to the terminal, then a line about its speed."""
    started = time.monotonic()
    first = ended = started
    num_tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=max_tokens,
        temperature=temperature,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            ended = time.monotonic()
            first = ended if first == started else first
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    print()
    pace = (num_tokens - 1) / (ended - first) if ended > first else 0.0
    print(f"[{num_tokens} tokens, first after {first - started:.2f} s, then {pace:.1f} tokens/s]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="What is gravity?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest")
    options = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "any")
    client = openai.OpenAI(base_url=options.base_url, api_key=key)
    try:
        ask(client, options.model, options.question, options.max_tokens, options.temperature)
    except openai.APIConnectionError:
        raise SystemExit(f"no server at {options.base_url}: start one with `make serve`") from None


if __name__ == "__main__":
    main()
