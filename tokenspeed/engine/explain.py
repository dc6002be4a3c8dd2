"""`tokenspeed explain`: what the compiler made of a model, read from its cache entry."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenspeed.compile.cache import CompileCache, cache_root
from tokenspeed.compile.entry import Damaged, Entry
from tokenspeed.compile.explanation import Explanation, explanation_of
from tokenspeed.config import Config
from tokenspeed.engine.explain_html import html_of
from tokenspeed.engine.explain_text import text_of
from tokenspeed.engine.warmup import CompileError, filled
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.output_file import check_target
from tokenspeed.text.errors import ModelError


def explain(config: Config, *, as_json: bool, html: str | None) -> int:
    """Print the receipt of what these settings run; it is compiled first if it is not in the cache.
    The exit code. Raises ConfigError for settings that cannot be taken.
    """
    if html is not None:
        check_target("--html", html)
    try:
        entry = entry_of(config)
        explained = explanation_of(entry)
        if html is not None:
            Path(html).write_text(html_of(explained), encoding="utf-8")
            logger.info("%s: open it in a browser; it needs no network", html)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    except (CompileError, Damaged, OSError) as error:
        logger.error("%s", error)
        return 1
    if as_json:
        print(_json(explained))
    elif html is None:
        print(text_of(explained))
    return 0


def entry_of(config: Config) -> Entry:
    """The cache entry that a start with these settings takes, made if there is none."""
    if config.compile.level == 0:
        raise ConfigError("-O0 compiles nothing, so there is nothing to explain; leave it out")
    return filled(CompileCache(cache_root(config.compile.cache_dir)), config)


def _json(explained: Explanation) -> str:
    return msgspec.json.format(msgspec.json.encode(explained), indent=1).decode()
