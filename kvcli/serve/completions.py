"""OpenAI's older interface: completions of texts, one or several in a call."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvcli.errors import UsageError
from kvcli.runtime.engine.events import End, Event, Logprobs, Token
from kvcli.serve import asked, wire
from kvcli.serve.asked import Json
from kvcli.serve.host import Host
from kvcli.serve.openai import Sampled, failed, finish, timings, usage_of
from kvcli.serve.replies import Answer, Question, Reply
from kvcli.serve.serving import Engines


class TextCall(Sampled, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def questions(self, serving: Engines) -> list[Question]:
        """One for each prompt. Raises UsageError."""
        asked.refuse({"suffix": self.suffix}, "cannot be used: the model continues texts")
        if self.echo and self.logprobs is not None:
            raise UsageError(
                "`echo` and `logprobs` cannot be used together: the prompt's own are not computed",
                "leave one of them out",
            )
        if self.best_of not in (None, self.n or 1):
            raise UsageError("`best_of` must be what `n` is")
        limit = 16 if self.max_tokens is None else self.max_tokens  # as the interface has it
        options = asked.options(self.options(serving, logprobs=self.logprobs), max_tokens=limit)
        count = 1 if self.n is None else self.n
        return [
            Question(self.model, asked.Raw(each), options, count, chars=len(each) if isinstance(each, str) else 0)
            for each in _listed(self.prompt)
        ]


def _listed(prompt: str | list[Any]) -> list[str | list[int]]:
    """The texts, or lists of token ids, of one or more prompts. Raises UsageError."""
    ids = isinstance(prompt, list) and any(isinstance(each, int) for each in prompt)
    found = [prompt] if ids or isinstance(prompt, str) else list(prompt)
    if not found or not all(found):
        raise UsageError("`prompt` is empty")
    if ids and not all(isinstance(each, int) for each in prompt):
        raise UsageError("`prompt` mixes texts and token ids", "give texts, ids of one prompt, or lists of ids")
    return found


def _text_logprobs(found: list[Logprobs], at: int) -> Json:
    """`at`: where in the text of the choice the first of them begins."""
    offsets = []
    for each in found:
        offsets.append(at)
        at += len(each.chosen.token)
    return {
        "tokens": [each.chosen.token for each in found],
        "token_logprobs": [max(each.chosen.logprob, -9999.0) for each in found],
        "top_logprobs": [{top.token: max(top.logprob, -9999.0) for top in each.top} for each in found],
        "text_offset": offsets,
    }


class _Texts:
    """The objects of one call for completions, of several prompts perhaps."""

    def __init__(self, call: TextCall, served: str, prompts: list[str], count: int) -> None:
        self.call, self.prompts, self.count = call, prompts, count
        self.head = {"id": wire.new_id("cmpl-"), "object": "text_completion", "created": int(time.time())}
        self.head["model"] = served
        self.with_usage = call.with_usage
        self.offsets: dict[int, int] = {}  # of the tokens that come next, by the numbers of choices

    def choice(self, index: int, text: str, told: list[Logprobs], reason: str | None) -> Json:
        """A choice, or the next piece of it."""
        at = self.offsets.get(index, 0)
        logprobs = _text_logprobs(told, at) if self.call.logprobs is not None else None
        self.offsets[index] = at + sum(len(each.chosen.token) for each in told)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def whole(self, answers: list[list[Answer]]) -> Json:
        choices, tokens = [], []
        for prompt, (lead, found) in enumerate(zip(self.prompts, answers, strict=True)):
            for number, answer in enumerate(found):
                index = prompt * self.count + number
                choices.append(self.choice(index, lead + answer.text, answer.logprobs, finish(answer.end)))
            tokens.append(usage_of([each.end for each in found]))
        total = _added(tokens)
        return {
            **self.head,
            "choices": choices,
            "usage": total,
            "timings": timings(*(found[0].end for found in answers)),
        }

    def chunk(self, index: int, event: Event) -> str:
        if not isinstance(event, (Token, End)):
            return ""
        told = [event.logprobs] if isinstance(event, Token) and event.logprobs is not None else []
        if not (event.text or told or isinstance(event, End)):
            return ""
        reason = finish(event) if isinstance(event, End) else None
        more: Json = {"usage": None} if self.with_usage else {}
        return wire.event({**self.head, "choices": [self.choice(index, event.text, told, reason)], **more})


def _added(found: list[Json]) -> Json:
    """The sum of several usages."""
    return {
        key: _added([each[key] for each in found]) if isinstance(value, dict) else sum(each[key] for each in found)
        for key, value in found[0].items()
    }


async def completions(request: Request, serving: Engines, body: bytes) -> Response:
    call = asked.decoded(body, TextCall)
    questions = call.questions(serving)
    if len(questions) > serving.most_prompts:
        raise UsageError(f"`prompt` has {len(questions)} prompts, at most {serving.most_prompts} go into a call")
    served = await wire.while_connected(request, serving.host.served(call.model))
    leads = ["" for _ in questions]
    if call.echo:
        made = [(await serving.host.prompt(question))[1] for question in questions]
        leads = [served.text.tokenizer.decode(prompt.ids) for prompt in made]
    form = _Texts(call, served.name, leads, questions[0].count)
    if call.stream:
        first = await wire.while_connected(request, serving.host.ask(questions[0]))
        return wire.Stream(_streamed(first, serving.host, questions, form), first, failed)
    answers = []
    for question in questions:
        async with await wire.while_connected(request, serving.host.ask(question)) as reply:
            answers.append(await wire.while_connected(request, reply.whole()))
    return wire.object_response(form.whole(answers))


async def _streamed(reply: Reply, host: Host, questions: list[Question], form: _Texts) -> wire.Pieces:
    """One prompt after the other; `reply` is to the first. Raises KVError."""
    tokens = []
    for prompt, question in enumerate(questions):
        ends: list[End] = []

        def write(number: int, event: Event, prompt: int = prompt, ends: list[End] = ends) -> str:
            if isinstance(event, End):
                ends.append(event)
            return form.chunk(prompt * form.count + number, event)

        lead = form.chunk(prompt * form.count, Token(None, form.prompts[prompt]))
        reply = await host.ask(question) if prompt else reply
        async for text in wire.pieces(reply, lead, write, str, ": ping\n\n"):
            yield text
        tokens.append(usage_of(ends))
    if form.with_usage:
        yield wire.event({**form.head, "choices": [], "usage": _added(tokens)})
    yield wire.event("[DONE]")


ROUTES = (("POST", "/v1/completions", completions),)
