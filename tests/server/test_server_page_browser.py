"""The page in a real browser: chat, stop, key, figures; and nothing that its policy refuses."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator

import pytest
from browser import Browser, browser
from running_server import Running, running
from server_fakes import FakeClient

from tokenspeed.engine.messages import Stats

pytestmark = pytest.mark.long

ENTER = "\ue007"
ANSWER = "<b>Paris</b> & nothing else."
LAST = ".message:last-child"


@pytest.fixture
async def page() -> AsyncIterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("chromedriver is not installed")
    async with browser(driver) as opened:
        yield opened


async def opened(page: Browser, server: Running) -> None:
    await server.until("ready")
    await page.open(server.url)
    await page.until("document.querySelector('#phase').textContent === 'ready'")


async def errors(page: Browser) -> list[str]:
    return [line for line in await page.log() if "[DOM]" not in line]


async def test_a_conversation_streams_in(page: Browser) -> None:
    client = FakeClient(ANSWER)
    client.pause_s = 0.02
    async with running(client) as server:
        await opened(page, server)
        assert not await page.run("document.querySelector('#key-entry').checkVisibility()")
        await page.write("#system", "You are terse.")
        await page.write("#prompt", "Where?" + ENTER)
        await page.until(f"document.querySelector('{LAST}').textContent.includes('Par')")
        assert await page.run("document.querySelector('#send').disabled")
        await page.until("!document.querySelector('#send').disabled")
        assert ANSWER in await page.text(LAST) and "tokens/s" in await page.text(LAST)
        assert await page.run("document.querySelectorAll('#messages b').length") == 0
        await page.write("#prompt", "Sure?")
        await page.click("#send")
        await page.until("document.querySelectorAll('.message').length === 4")
        await page.until("!document.querySelector('#send').disabled")
        first, second = client.requests
        assert len(second.prompt_ids) > len(first.prompt_ids) + len(ANSWER)
        assert not await errors(page)
        await page.click("#clear")
        assert await page.run("document.querySelectorAll('.message').length") == 0


async def test_stop_aborts_in_the_engine(page: Browser) -> None:
    client = FakeClient("and on " * 30)
    client.pause_s = 0.05
    async with running(client) as server:
        await opened(page, server)
        await page.write("#prompt", "Go" + ENTER)
        await page.until(f"document.querySelector('{LAST}').textContent.includes('and on')")
        await page.click("#stop")
        await page.until(f"document.querySelector('{LAST}').textContent.includes('stopped')")
        await page.until("!document.querySelector('#send').disabled")
        async with asyncio.timeout(5):
            while client.running:
                await asyncio.sleep(0.01)
        assert len(client.aborted) == 1
        assert not await errors(page)


async def test_a_server_with_keys_asks_for_one(page: Browser) -> None:
    async with running(FakeClient(ANSWER), api_key=("k3y",)) as server:
        await opened(page, server)
        await page.write("#prompt", "Hi" + ENTER)
        await page.until("document.querySelector('.error')?.textContent.includes('API key')")
        assert await page.run("document.querySelector('#prompt').value") == "Hi"
        await page.write("#key", "k3y")
        await page.click("#send")
        await page.until(f"document.querySelector('{LAST}').textContent.includes('Paris')")


async def test_figures_are_live(page: Browser) -> None:
    client = FakeClient()
    client.phases.enter("weights")
    client.phases.end()
    async with running(client) as server:
        await opened(page, server)
        shown = "document.querySelector('#{}').textContent"
        await page.until(f"{shown.format('output-rate')} === '0.0 tokens/s'")
        client.stats = Stats(
            num_running=3,
            num_waiting=2,
            kv_usage=0.37,
            prefix_queries=1000,
            prefix_hits=440,
            generation_tokens=5000,
        )
        await page.until(f"{shown.format('running')} === '3'")
        for name, text in (("waiting", "2"), ("kv-shown", "37.0 %"), ("hits", "44.0 %")):
            assert await page.text(f"#{name}") == text
        await page.until(f"parseFloat({shown.format('output-rate')}) > 100")
        assert "weights" in await page.text("#phases") and "total" in await page.text("#phases")
        client.die()
        await page.until(f"['dead', 'not reachable'].includes({shown.format('phase')})")
