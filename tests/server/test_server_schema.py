"""Requests that schemathesis makes from /openapi.json, good and bad ones: none is a server error,
every answer is one that the document tells, and the next normal request gives what it did before.

What a document of types cannot tell, as that a list must not be empty, may be refused.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from server_fakes import Asker, FakeClient, make_state
from tool_fakes import QWEN

from tokenspeed.server.openapi import document

NOT_TOLD = [positive_data_acceptance]
CHECKED = HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large


def api(**phases: bool) -> schemathesis.BaseSchema:
    """All operations; what is tried of each: random requests, and a table of all cases."""
    schema = schemathesis.openapi.from_dict(json.loads(document()))
    for name, enabled in phases.items():
        getattr(schema.config.phases, name).enabled = enabled
    return schema


few = api(coverage=False).include(method="POST")


@few.parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=CHECKED)
def test_requests_of_the_document(case: schemathesis.Case) -> None:
    asyncio.run(ask_for(case))


@pytest.mark.long
@api().parametrize()
@settings(max_examples=50, deadline=None, suppress_health_check=CHECKED)
def test_many_requests_of_the_document(case: schemathesis.Case) -> None:
    asyncio.run(ask_for(case))


async def ask_for(case: schemathesis.Case) -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, template=QWEN))
    words: dict[str, Any] = case.as_transport_kwargs(base_url="http://server")
    given = ("method", "url", "headers", "params", "json")
    asked = {name: words[name] for name in given if words.get(name) is not None}
    answer = await ask.http.request(**asked, content=words.get("data"))
    assert answer.status_code < 500, answer.text
    case.validate_response(answer, excluded_checks=NOT_TOLD)
    await ask.http.post("/continue_generation")
    await ask.check_alive()
    await ask.http.aclose()
