"""`Opened`: what is read of a model before its weights: header, sizes, tokenizer and chat template. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.errors import ModelError, UsageError, of_draft_model
from kvcli.options import MODELS_OWN, LoadOptions
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.formats.modelfile import ModelFile
from kvcli.runtime.headers.openmodel import open_model
from kvcli.runtime.headers.titles import title_of
from kvcli.runtime.host import machine, preload, upload
from kvcli.runtime.host.device import AUTO, check_there, parse_device, promising
from kvcli.runtime.host.memory import CUDA, gpus
from kvcli.runtime.host.upload import Upload
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.plan.footprint import WeightBytes, weights_of_tensors
from kvcli.runtime.text.modeltext import ModelText
from kvcli.runtime.text.tokenizer import import_library

if TYPE_CHECKING:
    from kvcli.runtime.headers.eagle import EagleHead


class Opened:
    """One model's files, open and checked, as far as that needs no torch; its libraries are loaded meanwhile.

    `tell` is called for what is noticed while text is made; whoever goes on with the model puts its own in place.
    `cards`: the memory of GPUs as it was before.
    """

    file: ModelFile
    config: ModelConfig
    text: ModelText
    title: str

    @classmethod
    def draft(cls, path: Path, load: LoadOptions) -> Opened | EagleHead:
        """A model, or a head, that is to draft for the one of these options. Raises as `__init__` does."""
        with of_draft_model():
            if path.is_dir() or path.suffix == ".safetensors":
                from kvcli.runtime.headers.eagle import EagleHead, is_head

                if is_head(path):
                    return EagleHead(path)
            return cls(path, replace(load, quantize="", chat=MODELS_OWN), sends=False)

    def __init__(self, path: Path, load: LoadOptions, kept: Opened | None = None, sends: bool = True) -> None:
        """`kept`: the same files, opened with options that differ in the use of text alone; `sends`: whether the file
        may be on its way to a GPU at once. Raises ModelError,
        DeviceError for a GPU that is not there, and UsageError for a GGUF file that is to be quantized."""
        self.began = time.perf_counter()
        self.cards = gpus()
        self.file = file = kept.file if kept else open_model(path, load.quantize)
        self.config = kept.config if kept else from_gguf(file.metadata, {n: t.shape for n, t in file.tensors.items()})
        self._bytes: dict[tuple[str, bool], WeightBytes] = kept._bytes if kept else {}
        kind, index = parse_device(load.device)
        if kind == CUDA and load.backend == AUTO:
            check_there(load.device, index, len(machine.graphics()))
        self.upload = self._upload(load) if sends and not kept else None
        try:
            self._make_text(path, load, kept)
        except BaseException:
            with self.sending():
                raise

    def _make_text(self, path: Path, load: LoadOptions, kept: Opened | None) -> None:
        file = self.file
        import_library(file.metadata)
        _check_folder()
        preload.load_torch()
        self.path = path
        self.title = kept.title if kept and kept.path == path else title_of(path, file.size, file.metadata)
        self.notices: list[str] = list(file.notices)
        self.tell = self.notices.append
        tokenizer = kept.text.tokenizer if kept else None
        how = load.force, load.chat_anyway, load.chat, lambda text: self.tell(text), tokenizer
        self.text = ModelText.of(file.metadata, path.name, *how)
        if self.text.tokenizer.vocab_size > self.config.vocab_size:
            rows = f"the embedding {self.config.vocab_size} rows"
            raise ModelError(f"the vocabulary has {self.text.tokenizer.vocab_size} tokens, {rows}")

    def weight_bytes(self, kind: str, interleaved: bool) -> WeightBytes:
        """The model's weights on a device of that kind, without adapters. See `weights_of_tensors`."""
        if (kind, interleaved) not in self._bytes:
            found = weights_of_tensors(self.file.tensors, self.config, kind, interleaved=interleaved)
            self._bytes[kind, interleaved] = found
        return self._bytes[kind, interleaved]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Inside, the file may be on its way to a GPU, or there; afterwards it is not."""
        try:
            yield
        finally:
            if self.upload is not None:
                self.upload.close()

    def _upload(self, load: LoadOptions) -> Upload | None:
        """The file on its way to the GPU that will probably compute; None = it is read as its tensors are wanted."""
        own = load.backend == AUTO and load.memory_limit is None
        index, file = promising(load.device) if own else None, self.file
        if index is None or not isinstance(file, GGUFFile) or len(file.paths) > 1 or self.config.latents:
            return None
        return upload.begin(file.paths[0], file.size, index, self.cards[index].free)


def _check_folder() -> None:
    """Raises UsageError where the current folder is gone: torch's libraries would end the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder no longer exists", "change to another one") from None
