"""`Kernels`: those of an engine on a GPU are compiled in parallel before they are needed, and once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch

from kvcli.errors import DoesNotFit
from kvcli.kernels.gpu.compiled import leave
from kvcli.kernels.gpu.forked import compile_all
from kvcli.kernels.gpu.launching import collecting
from kvcli.runtime.host.cores import usable_cpus

Launches = Iterable[Callable[[], None]]


class Kernels:
    """Those of single tokens and short prompts are compiled first, so that a short run need not wait for the others,
    which are compiled when a longer prompt comes. What was compiled in an earlier process is loaded from disk as it is
    launched."""

    def __init__(self, mark: Path, first: Launches, others: Launches) -> None:
        """`mark`: see `compiled.mark_of`. `first` and `others` launch what is to be compiled; nothing of it is run."""
        self._mark, self._others = mark, others
        self._compile("first", first)

    def need_all(self) -> None:
        """Compile the others, if they are not."""
        others, self._others = self._others, ()
        with suppress(DoesNotFit):  # pages for a prompt that is not there: what lacks is compiled as it is launched
            self._compile("others", others)

    def _compile(self, name: str, launches: Launches) -> None:
        mark = self._mark.with_suffix(f".{name}")
        if launches and not mark.exists():
            with collecting() as variants, torch.inference_mode():
                for launch in launches:
                    launch()
            compile_all(variants, len(usable_cpus()))
            leave(mark)
