"""What a fact that differs is set by: nothing is named that nobody set and that only followed."""

from __future__ import annotations

import pytest
from test_compile_key import BASE

from tokenspeed.compile.causes import _CAUSES, explained
from tokenspeed.compile.facts import Change, flat
from tokenspeed.config import OPTIONS

LAYOUT, PASS = "layout.embed_tokens", "compile.passes.all.07 rope"


def change(name: str, here: str = "1", there: str = "2") -> Change:
    return Change(name, here, there)


def told(changes: list[Change], *given: str) -> dict[str, str]:
    return {each.change.name: each.set_by for each in explained(changes, given)}


def test_every_fact_has_a_cause() -> None:
    for name in (*(name for name, _ in flat(BASE)), LAYOUT, "settings.TRITON_X", "machine.gpu"):
        assert any(cause.is_of(change(name)) for cause in _CAUSES), name


def test_every_way_is_there() -> None:
    flags = {option.flag for option in OPTIONS.values()} | {"OMP_NUM_THREADS"}
    assert {way for cause in _CAUSES for way in cause.ways} <= flags


@pytest.mark.parametrize(
    ("names", "given", "causes"),
    [
        (["compile.dtype", LAYOUT], ["--dtype"], ["--dtype", "follows from compile.dtype"]),
        (
            ["compile.device", "compile.dtype", LAYOUT, "machine.gpu"],
            ["--device"],
            ["--device", *["follows from compile.device"] * 3],
        ),
        (
            ["compile.dtype", LAYOUT],
            ["--dtype", "--weight-layout"],
            ["--dtype", "--weight-layout"],
        ),
        ([LAYOUT], ["--weight-layout"], ["--weight-layout"]),
        ([LAYOUT], [], ["the model's files, or --weight-layout there"]),
        ([LAYOUT], ["--dtype"], ["the model's files, or --weight-layout there"]),
        (["compile.strict_passes"], [], ["--strict-passes there"]),
        (["machine.threads"], ["OMP_NUM_THREADS"], ["OMP_NUM_THREADS"]),
        (["machine.threads"], [], ["the cores, or OMP_NUM_THREADS there"]),
        (["fact.of.another.time"], [], ["the version of TokenSpeed"]),
    ],
)
def test_what_was_set_and_what_followed(
    names: list[str], given: list[str], causes: list[str]
) -> None:
    assert told([change(name) for name in names], *given) == dict(zip(names, causes, strict=True))


@pytest.mark.parametrize(
    ("here", "there", "given", "cause"),
    [
        ("'disabled'", "'on'", ["--disable-pass"], "--disable-pass"),
        ("'on'", "'disabled'", [], "--disable-pass there"),
        ("absent", "'on'", ["--compile-ranges"], "--compile-ranges"),
        ("absent", "'on'", [], "follows from compile.device"),
        ("'off on cuda'", "'on'", ["--disable-pass"], "follows from compile.device"),
    ],
)
def test_a_pass_is_off_for_several_reasons(
    here: str, there: str, given: list[str], cause: str
) -> None:
    assert told([change("compile.device"), change(PASS, here, there)], *given)[PASS] == cause


def test_sources_follow_from_the_model_and_from_the_layout() -> None:
    source = change("sources.models/blocks.py", "absent", "'0'")
    assert told([source, change(LAYOUT)])[source.name] == "follows from layout"
    assert told([source, change("compile.model")])[source.name] == "follows from compile.model"
    assert told([source])[source.name] == "the version of TokenSpeed"
    edited = change("sources.models/blocks.py", "'1'", "'0'")
    assert told([edited, change(LAYOUT)])[edited.name] == "the version of TokenSpeed"


def test_another_pipeline_is_nobodys_setting() -> None:
    changes = [change(PASS, "absent", "'on'"), change("sources.passes/__init__.py")]
    cause = "follows from sources.passes/__init__.py"
    assert told(changes)[PASS] == explained(changes)[-1].set_by == cause
    assert told(changes, "--compile-ranges")[PASS] == "--compile-ranges"
    assert told([change(PASS, "absent", "'on'")])[PASS] == "--compile-ranges there"


def test_followers_come_last_and_a_log_names_what_could_be_set() -> None:
    """Of a start nobody knows there what was given."""
    found = explained([change("compile.dtype"), change(LAYOUT), change("versions.torch")])
    assert list(map(str, found)) == [
        "compile.dtype 1 (there 2), set by --dtype",
        "versions.torch 1 (there 2), set by the packages installed",
        f"{LAYOUT} 1 (there 2), follows from compile.dtype",
    ]
