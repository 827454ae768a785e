"""Failures as HTTP has them: a status, and what each interface needs to word it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcli.errors import ContextOverflow, DoesNotFit, KVError, UsageError
from kvcli.runtime.text.template import TemplateError
from kvcli.serve.replies import NoModel
from kvcli.serve.worker import Busy, Stopped


class Refused(KVError):
    """A call that is not answered, with its status."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status


@dataclass(frozen=True)
class Failure:
    """`code`: a word for programs; "" = there is none."""

    status: int
    message: str
    code: str = ""

    @classmethod
    def of(cls, error: KVError) -> Failure:
        message = f"{error.message}: {error.hint}" if error.hint else error.message
        message = re.sub(r"`ctx=(\d+)`", r"a server with --ctx-size \1", message).replace("`", "'")
        if isinstance(error, Refused):
            return cls(error.status, message)
        if isinstance(error, ContextOverflow):
            return cls(400, message, "context_length_exceeded")
        if isinstance(error, NoModel):
            return cls(404, message, "model_not_found")
        if isinstance(error, (UsageError, TemplateError)):
            return cls(400, message)
        if isinstance(error, Busy):
            return cls(429, message, "busy")
        if isinstance(error, (Stopped, DoesNotFit)):
            return cls(503, message)
        return cls(500, message)
