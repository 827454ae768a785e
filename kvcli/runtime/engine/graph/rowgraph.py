"""One token on a GPU for models that tokengraph.py has no kernels for: the decoder's own pass over one row and its
logits, the kernels of prompts, captured once as a CUDA graph and replayed."""

from __future__ import annotations

from typing import cast

from kvcli.runtime.cache.sequence import Step
from kvcli.runtime.engine.graph.nexttoken import NextToken
from kvcli.runtime.engine.graph.stepgraph import BoundPart, BoundStep


class RowGraph(NextToken):
    """The next token by the decoder of any model."""

    def launch(self, bucket: int) -> None:
        """See `NextToken.launch`."""
        step = BoundStep(self.token, (((0, 1), BoundPart(self._pages, bucket, legs=self._legs)),))
        self.logits.copy_(self.model.logits(self.model.hidden(cast(Step, step)))[0])
