"""`Serving`: what every call finds: who answers, and what holds for calls that do not say otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcli.options import SampleOptions
from kvcli.serve.host import Host
from kvcli.serve.replies import Answers

By = TypeVar("By", bound=Answers, covariant=True)


@dataclass(frozen=True)
class Serving(Generic[By]):
    """`sampling`: of calls that say nothing; `most_prompts`: in one call for completions."""

    host: By
    sampling: SampleOptions
    most_prompts: int = 64


Engines = Serving[Host]  # models of this process
