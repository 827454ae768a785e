"""What a failure says over HTTP."""

from __future__ import annotations

from kvcli.errors import ContextOverflow
from kvcli.serve.failures import Failure


def test_a_larger_context_is_one_of_the_server() -> None:
    found = Failure.of(ContextOverflow("the prompt has 900 tokens", "shorten it or use `ctx=900` or more"))
    assert found.status == 400 and found.code == "context_length_exceeded"
    assert found.message == "the prompt has 900 tokens: shorten it or use a server with --ctx-size 900 or more"
