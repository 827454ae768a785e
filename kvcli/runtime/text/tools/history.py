"""Calls of tools in a conversation, and what came of them, as a chat template takes them. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcli.runtime.text.tools.schemas import dumped, loads

if TYPE_CHECKING:
    from kvcli.runtime.text.template import ChatTemplate

Message = Mapping[str, Any]


def as_template_takes(messages: Sequence[Message], template: ChatTemplate) -> list[Message]:
    """The messages, with arguments as the template wants them, and with the name of the tool in each result: results
    tell by `tool_call_id`, or by their order, which call they are of."""
    if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return list(messages)
    names: dict[str, str] = {}
    waiting: list[str] = []  # names of calls without a result, in order
    found: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [_call(call, template.takes_objects) for call in calls]}
            waiting = [call["function"]["name"] for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
        elif message["role"] == "tool":
            first = waiting.pop(0) if waiting else ""
            name = message.get("name") or names.get(message.get("tool_call_id", ""), first)
            message = {**message, "name": name} if name else message
        found.append(message)
    return _with_responses(found) if "tool_responses" in template.tool_source else found


def _call(call: Mapping[str, Any], as_object: bool) -> dict[str, Any]:
    """With its arguments as an object, or as the text of one; what is no object stays a text."""
    function, arguments = call["function"], call["function"]["arguments"]
    if as_object and isinstance(arguments, str):
        try:
            value = loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    elif not as_object and not isinstance(arguments, str):
        arguments = dumped(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_responses(messages: Sequence[Message]) -> list[Message]:
    """Results as `tool_responses` of the message with the calls, as Gemma 4 has them."""
    found: list[Message] = []
    for message in messages:
        if message["role"] != "tool" or not found or found[-1]["role"] != "assistant":
            found.append(message)
            continue
        told = {"name": message.get("name", ""), "response": message["content"]}
        found[-1] = {**found[-1], "tool_responses": [*found[-1].get("tool_responses", ()), told]}
    return found
