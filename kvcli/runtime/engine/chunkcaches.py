"""`ChunkCaches`: the documents of a prompt are looked for one by one, and computed one by one where they are not found;
their rows take their places in the prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvcli.notices import Tell
from kvcli.options import CacheOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine import chunks
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.promptcache.caches import Ledger, LiveRows, Reuse
from kvcli.runtime.promptcache.lookup import PromptCaches
from kvcli.runtime.promptcache.marks import Mark, MovedChunk

LEAST = 256  # tokens of a document that is worth to be kept alone


@dataclass(frozen=True)
class Document:
    """A text that is cached alone: what people call it, and its tokens as a prompt of their own."""

    name: str
    ids: list[int]


class ChunkLedger(Ledger):
    """What became of the documents of one prompt. Nothing of it is kept: its rows are not those of the prompt."""

    def __init__(self, reuse: Reuse, found: tuple[MovedChunk, ...]) -> None:
        super().__init__(reuse)
        self._found = found

    def chunks(self) -> tuple[MovedChunk, ...]:
        return self._found


class ChunkCaches(LiveRows):
    """The caches of prompts that contain `documents`. Only documents are kept, each as a prompt of its own in 16 bits,
    of which all cache types are made. `close` waits until they are written."""

    def __init__(self, engine: Engine, documents: list[Document], options: PromptCacheOptions, tell: Tell) -> None:
        """`options`: of the store. Raises UsageError for a model whose rows cannot move."""
        chunks.check(engine)
        self.engine, self.tell = engine, tell
        self.documents = [each for each in documents if len(each.ids) >= LEAST]
        self.alone = engine if not any(g.sealed for g in engine.layout.groups) else engine.beside(_open(engine))
        self.caches: PromptCaches = self.alone.prompt_caches(
            replace(options, min_tokens=min(LEAST, options.min_tokens), lead=0, source=""), tell
        )

    def restore(self, seq: Sequence, prompt: list[int], marks: Iterable[Mark] = ()) -> Ledger:
        """See `Caches`: `seq` has the rows of the prompt up to the end of its last document, where it was empty."""
        if seq.length:
            return super().restore(seq, prompt, marks)
        found, disk, passed = list[MovedChunk](), 0, False
        for place in chunks.find(prompt, [each.ids for each in self.documents], LEAST):
            document, source = self.documents[place.chunk], self.alone.new_sequence()
            try:
                disk += self.read(source, document)
                gate = 0 if passed else chunks.GATE
                moved = chunks.put(self.engine, seq, prompt, place, self.alone, source, gate=gate, limit=chunks.LIMIT)
            finally:
                source.close()
            passed |= moved.passed
            found.append(MovedChunk(document.name, place.hi - place.lo, moved.copied, moved.divergence))
            self._tell(found[-1])
        copied, count = sum(each.copied for each in found), sum(each.copied > 0 for each in found)
        how = f"{count} of {len(self.documents)} documents moved, lossy" if copied and seq.moved is not None else ""
        return ChunkLedger(Reuse(copied, min(disk, copied), how=how), tuple(found))

    def read(self, seq: Sequence, document: Document) -> int:
        """Have the rows of a document in an empty sequence of `alone`; how many were on disk. They are computed and
        kept where they are not found."""
        *_, end = self.alone.generate(seq, document.ids, SampleOptions(max_tokens=0), caches=self.caches)
        assert isinstance(end, End)
        return end.usage.disk_tokens

    def _tell(self, found: MovedChunk) -> None:
        if found.kld is not None and found.kld > chunks.LIMIT:
            self.tell.warn(
                f"{found.name} is computed: moved rows would change what is predicted behind them by {found.kld:.2f}"
                f" nats, above the limit of {chunks.LIMIT:g}"
            )

    def keeps(self, prompt_tokens: int) -> bool:
        return any(self.caches.keeps(len(each.ids)) for each in self.documents)

    def pump(self) -> None:
        self.caches.pump()

    def close(self) -> None:
        """Wait for what is being written."""
        self.caches.close()


def _open(engine: Engine) -> CacheOptions:
    """The options of an engine with 16 bits throughout."""
    return replace(engine.terms.options, type_k="f16", type_v="f16", ctx_size=engine.ctx_size)
