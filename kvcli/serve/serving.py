"""`Serving`: what every call finds: the models, and what holds for calls that do not say otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcli.options import SampleOptions
from kvcli.serve.host import Host


@dataclass(frozen=True)
class Serving:
    """`sampling`: of calls that say nothing; `most_prompts`: in one call for completions."""

    host: Host
    sampling: SampleOptions
    most_prompts: int = 64

    def models(self) -> list[dict[str, Any]]:
        """Those that are loaded, with what is known of them, then those that can be loaded."""
        found = []
        for served in self.host.loaded:
            engine = served.worker.engine
            type_k, type_v = engine.loaded.cache_types
            found.append(
                {
                    "name": served.name,
                    "created": served.created,
                    "loaded": True,
                    "title": engine.loaded.title,
                    "ctx_size": engine.ctx_size,
                    "type_k": type_k,
                    "type_v": type_v,
                    "device": str(engine.device),
                    "parallel": served.worker.parallel,
                    **served.facts,
                }
            )
        there = {each["name"]: each for each in found}
        for known in self.host.known():
            facts = {"arch": known.arch, "file_bytes": known.size, "digest": known.digest}
            if known.name not in there:
                found.append({"name": known.name, "created": 0, "loaded": False, **facts})
            elif known.digest:
                there[known.name]["digest"] = known.digest  # as it was before it was loaded
        return found
