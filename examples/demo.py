"""Start a server on a free port, ask it a question, stop it: what `make demo` runs."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
from chat_client import ask

QUESTION = "What is gravity? Answer in three sentences."
START_SECONDS = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Return when the model is loaded; exit if the server ended or took too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"demo: the server ended with status {server.returncode}; its log says why")
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    sys.exit(f"demo: the server was not ready after {START_SECONDS} s")


def main() -> None:
    port = free_port()
    command = ["-P", "-m", "tokenspeed", "serve", "smollm2", "--port", str(port)]
    print("$ tokenspeed", *command[3:], flush=True)
    server = subprocess.Popen([sys.executable, *command])
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/ready")
        print(f"\n> {QUESTION}\n", flush=True)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any")
        ask(client, "smollm2", QUESTION, max_tokens=160)
        print("\nThe same server, for as long as you like: make serve", flush=True)
    finally:
        server.terminate()
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
