"""EXAONE 3 and 3.5 (arXiv 2412.04862): a Llama whose files keep rows of q and k in the order of halves."""

from __future__ import annotations

from kvcli.runtime.model.architecture import Architecture

ARCHITECTURE = Architecture(gguf=("exaone",), hf=("exaone",))
