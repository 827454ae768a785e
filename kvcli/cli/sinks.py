"""Where `kv run` sends its events: plain text, one JSON object at the end, or one JSON event a line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from kvcli.cli import jsonobjects
from kvcli.cli.invocation import Invocation
from kvcli.cli.outcome import Result
from kvcli.cli.render import DIM, RESET, Progress, use_color
from kvcli.cli.report import logprobs_object, result_object, sampling_object
from kvcli.cli.streams import OutputFile, TextOut, is_terminal, neutralise, say, write_err
from kvcli.cli.toolcalls import ToolCalls
from kvcli.cli.wrapping import Wrapper, columns
from kvcli.errors import OutputError
from kvcli.runtime.engine.events import End, Prefill, Token

BAR_FROM_TOKENS = 512  # a shorter prompt is read before a bar could be looked at


def sample_line(number: int, count: int, at_line_start: bool) -> str:
    """What stands above one of several answers, as text, behind one that may not have ended its line."""
    return ("" if at_line_start else "\n") + ("\n" if number > 1 else "") + f"== sample {number} of {count} ==\n"


class Sink(Protocol):
    """What a way of printing does with each event of a generation."""

    def start(self, model: str, params: Any) -> None: ...

    def prefill(self, event: Prefill) -> None: ...

    def token(self, event: Token) -> None: ...

    def end(self, result: Result) -> None: ...

    def sample(self, number: int, count: int) -> None:
        """What comes now is the answer `number`, from 1, of several to one prompt."""
        ...

    def broken(self) -> None: ...


class Thoughts:
    """What a model thinks, on stderr: dim on a terminal. With -q it is not shown."""

    def __init__(self, invocation: Invocation) -> None:
        self._shown = not invocation.quiet and sys.stderr is not None
        self._dim = self._shown and use_color(sys.stderr, invocation.color)
        self._wrapper = Wrapper(lambda: columns(sys.stderr)) if is_terminal(sys.stderr) else None
        self._begun = False

    def write(self, text: str) -> None:
        if self._shown:
            self._begun = True
            self._put(self._wrapper.feed(neutralise(text)) if self._wrapper else text)

    def end(self) -> None:
        """The answer comes, or nothing more: thinking has lines of its own, and on a terminal an empty one below."""
        if self._begun:
            self._put(self._wrapper.release() if self._wrapper else "")
            write_err("\n\n" if self._wrapper else "\n")
            if self._wrapper:
                self._wrapper.reset()
        self._begun = False

    def _put(self, text: str) -> None:
        if text:
            write_err(f"{DIM}{text}{RESET}" if self._dim else text)


class TextSink:
    """The generated text alone on stdout; a bar on stderr while the prompt is read."""

    def __init__(self, out: TextOut, invocation: Invocation, newline: bool = True) -> None:
        self.out, self.newline = out, newline
        self.progress = Progress(invocation, unit="tokens")
        self.thoughts = Thoughts(invocation)

    def start(self, model: str, params: Any) -> None:
        """Nothing is said before the first token."""

    def prefill(self, event: Prefill) -> None:
        if event.total >= BAR_FROM_TOKENS:
            self.progress("prefill", event.done, event.total)

    def token(self, event: Token) -> None:
        self.progress.close()
        self._write(event)

    def _write(self, event: Token | End) -> None:
        if event.reasoning:
            if self.out.tty and not self.out.at_line_start:
                self.out.end_line()
            self.thoughts.write(event.reasoning)
        if event.text:
            self.thoughts.end()
            self.out.write(event.text)

    def end(self, result: Result) -> None:
        self.finish(result.end, result.calls)

    def finish(self, end: End | None, calls: ToolCalls | None) -> None:
        """No more comes. `end`: what was held back, None = nothing."""
        self.progress.close()
        if end is not None:
            self._write(end)
        self.thoughts.end()
        if lines := calls.lines if calls else "":
            if not self.out.empty:
                self.out.end_line()
            self.out.write(lines)
        elif self.newline:
            self.out.end_line()
        self.out.flush()

    def sample(self, number: int, count: int) -> None:
        self.progress.close()
        self.out.write(sample_line(number, count, self.out.at_line_start))

    def broken(self) -> None:
        """No more text comes, but an error: it gets a line of its own on a terminal."""
        self.progress.close()
        self.thoughts.end()
        if self.out.tty and not self.out.empty:
            self.out.end_line()
        self.out.flush()


class CopySink:
    """What another sink does, and the text goes into a file, too: first, so that it has what stdout does not take."""

    def __init__(self, sink: Sink, file: OutputFile, newline: bool = True, answers: int = 1) -> None:
        self.sink, self.file, self.newline, self.left = sink, file, newline, answers

    def start(self, model: str, params: Any) -> None:
        self.sink.start(model, params)

    def prefill(self, event: Prefill) -> None:
        self.sink.prefill(event)

    def token(self, event: Token) -> None:
        self.file.write(event.text)
        self.sink.token(event)

    def end(self, result: Result) -> None:
        self.file.write(result.end.text)
        if lines := result.calls.lines if result.calls else "":
            if result.text and not self.file.at_line_start:
                self.file.end_line()
            self.file.write(lines)
        elif self.newline:
            self.file.end_line()
        self.file.whole = result.end.finish_reason != "interrupted"
        self.left -= 1
        remark = "" if self.left else self.file.keep()
        self.sink.end(replace(result, error=self.file.failure))
        if remark:
            say(remark)

    def sample(self, number: int, count: int) -> None:
        self.file.write(sample_line(number, count, self.file.at_line_start))
        self.sink.sample(number, count)

    def broken(self) -> None:
        self.sink.broken()


class NoSink(TextSink):
    """Only the bar."""

    def __init__(self, invocation: Invocation) -> None:
        super().__init__(TextOut.stdout(), invocation)

    def token(self, event: Token) -> None:
        """Nothing is shown."""

    def end(self, result: Result) -> None:
        self.progress.close()


class JsonSink:
    """One object when all is done."""

    def __init__(self, out: TextOut, invocation: Invocation) -> None:
        self.out, self.invocation = out, invocation

    def start(self, model: str, params: Any) -> None:
        """The object at the end says it all."""

    def prefill(self, event: Prefill) -> None:
        """The object at the end says it all."""

    def token(self, event: Token) -> None:
        self.invocation.answer.append(event.text)

    def end(self, result: Result) -> None:
        self._line("run", result_object(result))
        self.invocation.answered = True

    def sample(self, number: int, count: int) -> None:
        """Objects need no line between them."""

    def broken(self) -> None:
        """The error is an object of its own."""

    def _line(self, kind: str, value: dict[str, Any]) -> None:
        self.out.write(jsonobjects.line(kind, value))
        self.out.flush()


class SamplesSink(JsonSink):
    """One object with all answers to a prompt, when the last of `count` is done."""

    def __init__(self, out: TextOut, invocation: Invocation, count: int) -> None:
        super().__init__(out, invocation)
        self.count, self.objects = count, list[dict[str, Any]]()

    def end(self, result: Result) -> None:
        self.objects.append({"kv_schema": jsonobjects.VERSION, **result_object(result)})
        if len(self.objects) == self.count:
            self._line("run --n-samples", {"samples": self.objects})
            self.invocation.answered = True


class TurnSink(JsonSink):
    """One object for each answer of a chat."""

    def start(self, model: str, params: Any) -> None:
        self.invocation.answer.clear()

    def end(self, result: Result) -> None:
        self._line("chat", result_object(result))
        self.invocation.answer.clear()


class JsonlSink(JsonSink):
    """One event a line, each flushed, with the number of its answer from 0. Text that was held back to the end comes as
    a token without an id."""

    _sample = 0

    def start(self, model: str, params: Any) -> None:
        self._event("start", {"model": model, "sampling": sampling_object(params)})

    def prefill(self, event: Prefill) -> None:
        counts = {"done_tokens": event.done, "total_tokens": event.total, "cache_read_tokens": event.reused}
        self._event("progress", {"stage": "prefill", **counts})

    def token(self, event: Token) -> None:
        logprobs = {} if event.logprobs is None else {"logprobs": logprobs_object(event.logprobs)}
        self._text(event.id, event, logprobs)

    def _text(self, token_id: int | None, event: Token | End, more: dict[str, Any]) -> None:
        reasoning = {"reasoning": event.reasoning} if event.reasoning else {}
        self._event("token", {"token_id": token_id, "text": event.text, **reasoning, **more})

    def end(self, result: Result) -> None:
        if result.end.text or result.end.reasoning:
            self._text(None, result.end, {})
        for message in result.warnings:
            self._event("warning", {"message": message})
        self._event("end", result_object(result))

    def sample(self, number: int, count: int) -> None:
        self._sample = number - 1

    def _event(self, name: str, value: dict[str, Any]) -> None:
        self._line("run --jsonl", {"event": name, "sample": self._sample, **value})


class WhileRead:
    """Another sink. Once a signal is noted (`ended`), what cannot be written is dropped: the terminal may be gone, and
    whoever keeps the answer has it all the same."""

    def __init__(self, sink: Sink, ended: Callable[[], bool]) -> None:
        self.sink, self.ended = sink, ended

    def start(self, model: str, params: Any) -> None:
        self._write(self.sink.start, model, params)

    def prefill(self, event: Prefill) -> None:
        self._write(self.sink.prefill, event)

    def token(self, event: Token) -> None:
        self._write(self.sink.token, event)

    def end(self, result: Result) -> None:
        self._write(self.sink.end, result)

    def sample(self, number: int, count: int) -> None:
        self._write(self.sink.sample, number, count)

    def broken(self) -> None:
        self._write(self.sink.broken)

    def _write(self, write: Callable[..., None], *what: Any) -> None:
        try:
            write(*what)
        except OutputError:
            if not self.ended():
                raise
