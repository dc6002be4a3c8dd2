"""Starting the process that those of grammars come from; and when it cannot be, or is gone."""

from __future__ import annotations

import time

import pytest
from structured_tiny import EOS_IDS, VOCAB, tiny_tokenizer

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.request import InvalidRequest
from tokenspeed.structured import host as hosts
from tokenspeed.structured.host import GrammarHost, vocabulary_of
from tokenspeed.structured.orders import Vocabulary
from tokenspeed.structured.pool import GrammarPool
from tokenspeed.text.errors import ModelError


def vocabulary() -> Vocabulary:
    return vocabulary_of(tiny_tokenizer(), VOCAB, EOS_IDS)


def error_of(host: GrammarHost, regex: str) -> str | None:
    pool = GrammarPool(host)
    grammar = pool.get(StructuredOutputs(regex=regex))
    while not grammar.is_settled:
        pool.poll(grammar)
        time.sleep(0.002)
    pool.drop(grammar)
    return grammar.error


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ModelError("no tokenizer.json"), "no tokenizer.json"),
        (InvalidRequest("needs a tokenizer"), "needs a tokenizer"),
        (RuntimeError("secret"), hosts._NO_PROCESS),
    ],
)
def test_a_vocabulary_that_cannot_be_loaded(raised: Exception, told: str) -> None:
    def fail() -> Vocabulary:
        raise raised

    host = GrammarHost(fail)
    assert error_of(host, "a") == told


def test_a_model_without_ends_has_no_grammars() -> None:
    host = GrammarHost(lambda: vocabulary_of(tiny_tokenizer(), VOCAB, frozenset()))
    assert "no end-of-sequence token" in str(error_of(host, "a"))
    host.close()


def test_another_one_is_started_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_RESTART_S", 0.1)
    host = GrammarHost(vocabulary)
    assert error_of(host, "a") is None
    assert host._zygote is not None
    process = host._zygote.result().process
    process.kill()
    process.wait()
    assert error_of(host, "b") is None
    assert host._zygote.result().process is not process
    process = host._zygote.result().process
    host.close()
    assert process.poll() is not None


def test_no_process_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    host = GrammarHost(vocabulary)
    assert error_of(host, "a") is None

    def fail(name: str) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("os.memfd_create", fail)
        assert error_of(host, "b") == hosts._NO_PROCESS
    assert error_of(host, "b") is None
    host.close()
