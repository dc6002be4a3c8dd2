"""The page at /: what is served, under which policy; and that its parts know each other's names."""

from __future__ import annotations

import fnmatch
import html.parser
import posixpath
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from server_fakes import CHAT, Asker, FakeClient, make_state, refused

from tokenspeed.engine.messages import Stats
from tokenspeed.engine.phases import StartupPhases
from tokenspeed.server.page_routes import FILES, FOLDER, STATUS, PageStatus

TEXTS = {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}
SCRIPTS = [name for name in TEXTS if name.endswith(".js")]
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


class Page(html.parser.HTMLParser):
    """What an HTML file holds: ids, references, and the names of tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.attributes: set[str] = set()
        self.scripts: list[str] = []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._tag = tag
        self.attributes |= {name for name, _ in attrs}
        self.ids += [found["id"]] if found.get("id") else []
        self.references += [value for name in ("src", "href") if (value := found.get(name))]
        assert tag != "style" and not (tag == "script" and "src" not in found), "inline code"

    def handle_data(self, data: str) -> None:
        if self._tag == "script" and data.strip():
            self.scripts.append(data)


PAGE = Page(TEXTS["index.html"])


@pytest.mark.parametrize("path", [*FILES, STATUS])
async def test_everything_is_open_and_under_the_strict_policy(path: str) -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, api_key=("secret",)))
    answer = await ask.http.get(path)
    assert answer.status_code == 200 and "secret" not in answer.text
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
        **dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'"),
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    suffix = Path(FILES.get(path, "status.json")).suffix
    kinds = {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
        ".json": "application/json",
    }
    assert answer.headers["content-type"] == kinds[suffix]
    if path in FILES:
        assert answer.content == (FOLDER / FILES[path]).read_bytes()
    head = await ask.http.head(path)
    assert head.status_code == 200
    refused(await ask.http.post(path), 405)
    refused(await ask.http.post(CHAT, json={"messages": []}), 401)


async def test_the_page_can_be_switched_off() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, disable_page=True))
    for path in (*FILES, STATUS):
        refused(await ask.http.get(path), 404)
    assert (await ask.completion()).status_code == 200


async def test_no_other_file_is_served(ask: Asker) -> None:
    for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/page/x"):
        refused(await ask.http.get(path), 404)


async def test_status_says_what_goes_on() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, api_key=("secret",)))
    client.stats = Stats(num_running=2, kv_usage=0.5, generation_tokens=9)
    now = [10.0]
    client.phases = StartupPhases(lambda: now[0])
    for name, seconds in (("process", 1.0), ("weights", 2.0), ("weights", 1.5), ("kv", 0.5)):
        client.phases.enter(name)
        now[0] += seconds
    first = msgspec.json.decode((await ask.http.get(STATUS)).content, type=PageStatus)
    assert (first.models, first.needs_key, first.phase) == (("m", "alias"), True, "ready")
    assert [(each.name, each.seconds) for each in first.phases] == [
        ("process", 1.0),
        ("weights", 3.5),
        ("kv", 0.5),
    ]
    client.phases.end()
    now[0] += 100.0
    second = msgspec.json.decode((await ask.http.get(STATUS)).content, type=PageStatus)
    assert second.phases == first.phases and second.time >= first.time
    assert second.stats == client.stats
    client.state = "loading"
    loading = msgspec.json.decode((await ask.http.get(STATUS)).content, type=PageStatus)
    assert (loading.phase, loading.detail) == ("loading", "starting")


def test_the_package_holds_all_files_and_serves_them_all() -> None:
    assert set(FILES.values()) == set(TEXTS)
    setuptools = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]
    patterns = setuptools["package-data"]["tokenspeed"]
    for name in TEXTS:
        assert any(fnmatch.fnmatch(f"server/page/{name}", pattern) for pattern in patterns)


def test_html_has_no_code_and_loads_only_files_of_ours() -> None:
    assert PAGE.references and not PAGE.scripts
    for reference in PAGE.references:
        assert posixpath.join("/", reference) in FILES, "relative, so that a proxy may add a prefix"
    bad = {name for name in PAGE.attributes if name.startswith("on") or name in ("style", "action")}
    assert not bad
    assert len(PAGE.ids) == len(set(PAGE.ids))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_code_or_markup_of_text(name: str) -> None:
    text = TEXTS[name]
    for word in ("eval(", "Function(", "innerHTML", "outerHTML", "insertAdjacentHTML"):
        assert word not in text
    for word in ("document.write", "http:", "https:", "localStorage", "sessionStorage", "cookie"):
        assert word not in text
    for path in re.findall(r'^import .* from "(.*)";$', text, re.MULTILINE):
        assert posixpath.normpath(f"/page/{path}") in FILES


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_name_elements_that_are_there(name: str) -> None:
    used = set(re.findall(r'\$\("([^"]+)"\)', TEXTS[name]))
    used |= set(re.findall(r'setText\("([^"]+)"', TEXTS[name]))
    assert used <= set(PAGE.ids)
    assert used or name == "events.js"


def test_styles_load_nothing_and_name_elements_that_are_there() -> None:
    text = TEXTS["page.css"]
    assert "url(" not in text and "@import" not in text
    rules = re.sub(r"\{[^{}]*\}", "{}", text)  # selectors only: colours begin with # too
    assert set(re.findall(r"#([\w-]+)", rules)) <= set(PAGE.ids)


async def test_scripts_read_fields_and_ask_routes_that_exist(ask: Asker) -> None:
    load = TEXTS["load.js"]
    taken = set(re.findall(r"\bstatus\.(\w+)", load))
    for names in re.findall(r"^function show\w+\(\{ (.*) \}\) \{$", load, re.MULTILINE):
        taken |= set(names.split(", "))
    assert taken - {"ok"} <= set(PageStatus.__struct_fields__) and "stats" in taken
    figures = set(re.findall(r"\bstats\.(\w+)", load))
    renamed = re.search(r"const \{ (.*) \} = stats;", load)
    assert renamed
    figures |= {each.partition(":")[0] for each in renamed[1].split(", ")}
    assert figures <= set(Stats.__struct_fields__) and len(figures) >= 6
    for name in SCRIPTS:
        for path in re.findall(r'fetch\("([^"]+)"', TEXTS[name]):
            answer = await ask.http.get(f"/{path}")
            assert answer.status_code in (200, 405), path
