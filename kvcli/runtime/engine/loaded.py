"""`LoadedModel`: what there is of a model whatever the length of its context: weights, tokenizer, chat template."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvcli import kernels
from kvcli.codecs import canonical
from kvcli.errors import DoesNotFit, ModelError, UsageError, of_draft_model
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.engine import guard, samplesettings, strictrepeat
from kvcli.runtime.engine.held import HeldModel
from kvcli.runtime.engine.opened import Opened
from kvcli.runtime.engine.spec import DRAFT, MTP, drafting
from kvcli.runtime.engine.terms import Terms
from kvcli.runtime.formats import adapter
from kvcli.runtime.formats.ggufheader import TensorInfo
from kvcli.runtime.host.cores import physical_cores, too_many
from kvcli.runtime.host.device import AUTO, Device, choose
from kvcli.runtime.host.memory import CPU, CUDA, gpus, process_bytes
from kvcli.runtime.host.upload import Upload
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.loading import load as load_model
from kvcli.runtime.model.predictors import Predictor, load_eagle, load_next
from kvcli.runtime.model.weights import Weights
from kvcli.runtime.plan import repacked
from kvcli.runtime.plan.footprint import next_weights, tokenizer_bytes, weights_of_tensors
from kvcli.runtime.plan.plan import Drafting, engine_budget
from kvcli.runtime.promptcache import fingerprint

if TYPE_CHECKING:
    from kvcli.runtime.headers.eagle import EagleHead


class LoadedModel:
    """One file on one device. Any number of engines may run it; `terms` are those that it was loaded for.

    `notices`: what the user should know; `doubts`: those of them that say that answers may be worse than was asked for,
    or come much later. What is noticed later is told to `tell`, too.
    """

    backend: str
    weights: Weights
    decoder: Decoder

    @torch.inference_mode()
    def __init__(
        self,
        opened: Opened,
        load: LoadOptions,
        cache: CacheOptions,
        tell: Callable[[str], None] = lambda text: None,
        kept: LoadedModel | HeldModel | None = None,
        draft: Opened | EagleHead | None = None,
        terms: Terms | None = None,
        room: Callable[[int, str], bool] = lambda missing, uuid: False,
    ) -> None:
        """Check everything else that can be refused, then map the weights. `cache`: what engines are to be opened with.
        `kept`: the same file, loaded or held, whose weights are taken where they would be the same; `draft`: a model
        that is to guess tokens beside it; `terms`: what comes of the options, where that is known; `room`: has others
        free so many bytes, of the GPU of that UUID or ("") of main memory, and says whether any did.

        Raises ModelError, UsageError, NotTaken of what is held, and DoesNotFit before any weight is read.
        """
        self.opened, self.file = opened, opened.file
        self.path, self.title, self.config = opened.path, opened.title, opened.config
        self.text, self.tokenizer = opened.text, opened.text.tokenizer
        # Of the process, without the tokenizer, which is there already and planned like the rest.
        self.bytes_before = process_bytes() - tokenizer_bytes(self.config)
        self.notices, opened.tell = opened.notices, self.notice
        self.doubts: list[str] = []
        self._tell, self._room = tell, room
        with opened.sending():
            self._load(load, cache, kept, draft, terms)
            self.draft = self._drafting(draft, load, cache) if isinstance(draft, Opened) else None
            self.predictor = self._predictor(load, draft)
            self.load_s = time.perf_counter() - opened.began

    def _load(
        self, load: LoadOptions, cache: CacheOptions, kept: LoadedModel | HeldModel | None,
        draft: Opened | EagleHead | None, terms: Terms | None,
    ) -> None:  # fmt: skip
        """From the adapters on."""
        self.adapters = adapter.open_all(load.lora, self.file)
        self.lora_names = [f"{os.path.abspath(each.path)}:{each.scale:g}" for each in load.lora]  # as --lora takes them
        self.device = self._choose(load)
        if isinstance(kept, HeldModel) and kept.device != str(self.device):
            kept = None
        if isinstance(kept, HeldModel):
            self.opened.cards = kept.beside(self.opened.cards)
        self.exact = load.exact and self.device.kind == CUDA
        self.grain = 1  # rows are computed in blocks of so many, so that none depends on another one
        if load.strict_repeat and self.device.kind == CUDA:
            strictrepeat.check(load, cache, self.config)
            self.grain = strictrepeat.BLOCK
        self.cache_types = canonical(cache.type_k), canonical(cache.type_v)
        if cache.ubatch < 0:
            raise UsageError(f"`ubatch` must be 1 or more, not {cache.ubatch}", "0 = automatic")
        eviction.check(cache.evict, cache.page_size)
        self.threads = load.threads or physical_cores()
        if self.device.kind == CPU:
            self._note(too_many(self.threads))
        ops = self._on_cpu(load) if self.device.kind == CPU else None
        interleaved = isinstance(ops, kernels.NativeBackend) and not ops.exact
        self.terms = terms or self._with_room(load, cache, interleaved, draft)
        self.cards_before = self.opened.cards  # the memory of GPUs
        self.config = self.config.at(self.terms.ctx_size)
        self.sampling_defaults = samplesettings.model_defaults(self.file.metadata)
        self._note(samplesettings.not_obeyed(self.sampling_defaults))
        self._read_weights(ops or self._on_gpu(load), cache, self.opened.upload, kept)
        self.file.check()

    def _with_room(
        self, load: LoadOptions, cache: CacheOptions, interleaved: bool, draft: Opened | EagleHead | None
    ) -> Terms:
        """What the options come to, with what others free where memory is short. Raises as `_settled` does."""
        try:
            terms = self._settled(load, cache, interleaved, draft)
            if not (terms.shortened and terms.budget.grows and self._make_room(1)):
                return terms
        except DoesNotFit as error:
            if not error.missing or not self._make_room(error.missing):
                raise
        return self._settled(load, cache, interleaved, draft)

    def _make_room(self, missing: int) -> bool:
        """Whether others have freed memory of the device. What this process has of a GPU by now counts as free."""
        if self.device.kind == CPU:
            return self._room(missing, "")
        index, before = self.device.index, gpus()
        if not self._room(missing, before[index].uuid):
            return False
        freed = max(0, gpus()[index].free - before[index].free)
        cards = self.opened.cards
        self.opened.cards = [replace(x, free=x.free + freed * (i == index)) for i, x in enumerate(cards)]
        return True

    def _settled(
        self, load: LoadOptions, cache: CacheOptions, interleaved: bool, draft: Opened | EagleHead | None
    ) -> Terms:
        """What the options come to in the memory there is. Raises UsageError, ModelError for a draft model that cannot
        be one, and DoesNotFit."""
        kind = self.device.kind
        if self.adapters:
            weights = weights_of_tensors(self.file.tensors, self.config, kind, self.adapters, interleaved)
        else:
            weights = self.opened.weight_bytes(kind, interleaved)
        budget = engine_budget(load.memory_limit, kind, self.device.index, self.opened.cards)
        if load.mtp and draft is not None:
            raise UsageError("`mtp` and `draft` cannot be used together", "leave one of them out")
        if not isinstance(draft, Opened):
            beside = self._beside(cache, interleaved, draft) if load.mtp or draft else None
            return Terms.settle(self.config, weights, cache, budget, self.threads, beside)
        drafting.check(self.tokenizer, draft, cache, kind, self.grain > 1)
        theirs = draft.weight_bytes(kind, interleaved)
        self._note(drafting.too_large(weights, theirs))
        beside = Drafting(draft.config, theirs, KVLayout.of_options(draft.config, cache))
        terms = Terms.settle(self.config, weights, cache, budget, self.threads, beside)
        self._note(drafting.too_short(terms.ctx_size, draft.config))
        return terms

    def _beside(self, cache: CacheOptions, interleaved: bool, head: EagleHead | None) -> Drafting:
        """The layer of the file that predicts further tokens, or a head, as what is planned beside the model. Raises
        UsageError, and ModelError where it cannot be one."""
        kind = self.device.kind
        if head is not None:
            drafting.check_options(cache, self.grain > 1)
            drafting.check_head(self.config, head.config)
            drafting.check_device(head.config, repacked.matrix_types(head.tensors), kind)
            config, weights = head.config, weights_of_tensors(head.tensors, head.config, kind, (), interleaved)
        else:
            drafting.check_options(cache, self.grain > 1, "mtp")
            drafting.check_next(self.config, repacked.matrix_types(self.file.tensors), kind)
            config = self.config.predictor
            weights = next_weights(self.file.tensors, self.config, kind, interleaved)
        return Drafting(config, weights, KVLayout.of_options(config, cache), tokenizer=False)

    def _predictor(self, load: LoadOptions, head: EagleHead | Opened | None) -> Predictor | None:
        """The layer of the file that predicts further tokens, or the head, beside the decoder. Raises ModelError."""
        if load.mtp:
            self.sampling_defaults["spec"] = MTP
            return load_next(self.decoder, self.weights)
        if head is None or isinstance(head, Opened):
            return None
        self.sampling_defaults["spec"] = DRAFT
        with of_draft_model():
            config = head.config.at(self.terms.ctx_size)
            how = head.offsets, head.reads(self.config.n_layers), head.normed
            found = load_eagle(Weights(head), config, self.decoder, *how)
        self.decoder.taps = found.reads
        return found

    def _drafting(self, draft: Opened, load: LoadOptions, cache: CacheOptions) -> LoadedModel:
        """The draft model, on the same device. What is refused of it is said to be so."""
        load = replace(load, device=str(self.device), lora=(), quantize="", strict_repeat=False, mtp=False)
        with of_draft_model():
            tell = partial(_told_of_draft, self.notice)
            loaded = LoadedModel(draft, load, cache, tell, terms=self.terms.of_draft())
        self.notices += [f"draft: {text}" for text in loaded.notices]
        self.doubts += [f"draft: {text}" for text in loaded.doubts]
        self.sampling_defaults["spec"] = DRAFT
        return loaded

    def _choose(self, load: LoadOptions) -> Device:
        """The device to compute on. Raises UsageError or DeviceError, ModelError for a GPU that cannot compute it."""
        device = choose(load.device if load.backend == AUTO else CPU)
        if device.kind != CPU:
            reason = repacked.unfit(self.config, repacked.matrix_types(self.file.tensors))
            if reason and load.device != AUTO:
                raise ModelError(f"this model cannot be computed on a GPU: {reason}", "use `device=cpu`")
            if reason:
                device = Device(CPU, notice=f"runs on the CPU; a GPU cannot compute this model: {reason}")
        self._note(device.notice)
        return device

    def _on_cpu(self, load: LoadOptions) -> kernels.Backend:
        ops, notice = kernels.backend(load.backend, self.threads, exact=load.exact)
        if notice:
            self.doubts.append(notice)
            self._note(notice)
        return ops

    def _on_gpu(self, load: LoadOptions) -> kernels.Backend:
        block = self.grain if self.grain > 1 else 0
        return kernels.backend(load.backend, self.threads, str(self.device), block=block)[0]

    def _read_weights(
        self, ops: kernels.Backend, cache: CacheOptions, upload: Upload | None, kept: LoadedModel | HeldModel | None
    ) -> None:
        torch.set_num_threads(1)  # what is left to torch is too little to share: a token's sampling takes longer by two
        sent = None if upload is None or self.device.kind == CPU else partial(self._sent, upload)
        loaded = kept if isinstance(kept, LoadedModel) and kept.backend == ops.name else None
        same = loaded if loaded and loaded.config == self.config else None
        self.backend, self.weights = ops.name, same.weights if same else Weights(self.file, self.adapters, sent)
        if isinstance(ops, kernels.NativeBackend):
            ops.mapped = self.weights.mapped
        doubt = guard.check(self.weights, self.config, self.terms.layout, self.cache_types, cache.force_types)
        if doubt:
            self.doubts.append(doubt)
            self._note(doubt)
        if isinstance(kept, HeldModel):
            self.decoder = kept.decoder(self.config, self.weights, ops)
        else:
            self.decoder = same.decoder if same else load_model(self.config, self.weights, ops)
        if self.device.kind == CPU:
            self.weights.release()
        if self.device.kind == CUDA:
            torch.cuda.synchronize(ops.device)
            torch.cuda.empty_cache()  # what repacking needed for a while

    def _sent(self, upload: Upload, name: str) -> torch.Tensor | None:
        """The packed bytes of a tensor where they were sent to: uint8 [nbytes]; None = they were not."""
        info = self.file.tensors[name]
        assert isinstance(info, TensorInfo)
        found = upload.bytes_at(info.offset, info.nbytes)
        return None if found is None else torch.as_tensor(found, device=str(self.device))

    @property
    def facts(self) -> tuple[object, ...]:
        """What decides which kernels of a GPU are launched, beside sizes and options of the cache."""
        types = sorted((name, tensor.type, tensor.shape) for name, tensor in self.file.tensors.items())
        ranks = [(name, pair.rank) for each in self.adapters for name, pair in sorted(each.pairs.items())]
        return types, ranks, self.cache_types, self.grain, self.sampling_defaults

    @property
    def interleaved_bytes(self) -> int:
        """Of weights that a CPU keeps in another order than the mapped file has them."""
        ops = self.decoder.ops
        return ops.interleaved_bytes if isinstance(ops, kernels.NativeBackend) else 0

    @property
    def pending_bytes(self) -> int:
        """Of weights that are put into that order when they are used, and were not yet."""
        ops = self.decoder.ops
        return ops.pending_bytes if isinstance(ops, kernels.NativeBackend) else 0

    def finish(self) -> None:
        """Interleave now what otherwise is when it is used."""
        ops = self.decoder.ops
        if isinstance(ops, kernels.NativeBackend):
            ops.finish()

    def _note(self, text: str) -> None:
        if text and text not in self.notices:
            self.notices.append(text)

    @property
    def remedy(self) -> str:
        """What to do where the model's output is not a number."""
        if self.adapters:
            return "the adapter may be of another model, or its scale too large: try it without `lora`"
        return "the model file may be damaged; pull it again"

    def notice(self, text: str) -> None:
        """Note what the user should know, once, and tell it."""
        if text not in self.notices:
            self.notices.append(text)
            self._tell(text)

    def check_weights(self) -> None:
        """Raises ModelError where the file was truncated while it was read."""
        if self.device.kind == CPU:  # a GPU has its own copy
            for file in (self.file, *(each.file for each in self.adapters)):
                file.check()

    def tokenizer_hashes(self) -> dict[str, str]:
        """What token ids of a chat depend on: the tokenizer and the template, by content."""
        return fingerprint.text_hashes(self.file)


def _told_of_draft(tell: Callable[[str], None], text: str) -> None:
    tell(f"draft: {text}")
