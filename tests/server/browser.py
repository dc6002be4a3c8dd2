"""Headless Chromium, asked over chromedriver's HTTP (the W3C's WebDriver protocol)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's id, fixed by the standard."""

ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800")


class Browser:
    """One session."""

    def __init__(self, http: httpx.AsyncClient, session: str) -> None:
        self._http, self._path = http, f"/session/{session}"

    async def _post(self, path: str, **body: Any) -> Any:
        answer = await self._http.post(f"{self._path}/{path}", json=body)
        assert answer.status_code == 200, answer.text[:500]
        return answer.json()["value"]

    async def open(self, url: str) -> None:
        await self._post("url", url=url)

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return await self._post("execute/sync", script=f"return {script}", args=[])

    async def text(self, selector: str) -> str:
        return str(await self.run(f"document.querySelector({selector!r})?.textContent ?? ''"))

    async def click(self, selector: str) -> None:
        await self._post(f"element/{await self._find(selector)}/click")

    async def write(self, selector: str, text: str) -> None:
        await self._post(f"element/{await self._find(selector)}/value", text=text)

    async def _find(self, selector: str) -> str:
        found = await self._post("element", using="css selector", value=selector)
        return str(found[ELEMENT])

    async def until(self, script: str, seconds: float = 10.0) -> None:
        """Wait until a JavaScript expression holds."""
        async with asyncio.timeout(seconds):
            while not await self.run(script):
                await asyncio.sleep(0.05)

    async def log(self) -> list[str]:
        """What the browser has to say: errors of scripts, refusals of the policy, failed loads."""
        return [entry["message"] for entry in await self._post("se/log", type="browser")]

    async def screenshot(self, path: Path) -> None:
        answer = await self._http.get(f"{self._path}/screenshot")
        path.write_bytes(base64.b64decode(answer.json()["value"]))


@contextlib.asynccontextmanager
async def browser(driver: str) -> AsyncIterator[Browser]:
    """A new session of a new browser; `driver` is chromedriver's path."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        driver, f"--port={port}", stdout=asyncio.subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            async with asyncio.timeout(20):
                while not await _is_up(http):
                    await asyncio.sleep(0.05)
            options = {
                "goog:chromeOptions": {"args": list(ARGUMENTS)},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            asked = {"capabilities": {"alwaysMatch": options}}
            answer = await http.post("/session", json=asked)
            assert answer.status_code == 200, answer.text[:500]
            session = answer.json()["value"]["sessionId"]
            yield Browser(http, session)
            await http.delete(f"/session/{session}")
    finally:
        process.terminate()
        await process.wait()


async def _is_up(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/status")).status_code == 200
    except httpx.TransportError:
        return False
