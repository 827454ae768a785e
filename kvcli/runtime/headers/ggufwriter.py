"""`write_gguf`: a model as one GGUF file, written by the `gguf` package one tensor after the other."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.blockformats import FORMATS
from kvcli.runtime.formats.modelfile import ModelFile, Tensor
from kvcli.runtime.headers.facts import FILE_TYPES
from kvcli.runtime.hub.store import Progress, no_progress
from kvcli.runtime.text.vocabulary import UNUSED

if TYPE_CHECKING:
    import gguf

_ARCHITECTURE = "general.architecture"  # which the writer itself adds
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_MIXES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}  # what files are called that have most of these


def write_gguf(model: ModelFile, path: Path, progress: Progress | None = None) -> None:
    """Write `model` to `path`, which is there afterwards, whole, or not at all after an error.

    `progress(stage, done, total)` counts bytes. Raises ModelError for a folder that changes meanwhile, and OSError.
    """
    import gguf

    with tempfile.TemporaryDirectory(prefix=".kv-convert-", dir=path.parent) as place:
        part = Path(place) / path.name
        _write(model, gguf.GGUFWriter(part, model.metadata[_ARCHITECTURE]), progress or no_progress)
        part.replace(path)


def _write(model: ModelFile, writer: gguf.GGUFWriter, progress: Progress) -> None:
    import gguf
    import numpy as np

    try:
        for key, value in (model.metadata | _file_type(model) | _padded(model)).items():
            if key != _ARCHITECTURE:
                _add(writer, key, value)
        for tensor in model.tensors.values():
            shape, more = list(tensor.shape), _rows_lacking(model, tensor)
            shape[0] += more
            form = FORMATS[tensor.type]
            if form.elements > 1 or tensor.type == "BF16":  # the writer counts bytes of these
                shape[-1] = shape[-1] // form.elements * form.bytes
            kind = gguf.GGMLQuantizationType[tensor.type]
            dtype: Any = {"F32": np.float32, "F16": np.float16}.get(tensor.type, np.uint8)
            nbytes = tensor.nbytes + more * (tensor.nbytes // tensor.shape[0])
            writer.add_tensor_info(tensor.name, shape, np.dtype(dtype), nbytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(tensor.nbytes for tensor in model.tensors.values())
        for tensor in model.tensors.values():
            data, more = model.data(tensor.name), _rows_lacking(model, tensor)
            if more:  # as the first one
                data = np.concatenate([data, np.tile(data[: len(data) // tensor.shape[0]], more)])
            writer.write_tensor_data(data)
            model.check()
            done += tensor.nbytes
            progress("convert", done, total)
    finally:
        writer.close()


def _rows_lacking(model: ModelFile, tensor: Tensor) -> int:
    """How many rows fewer than tokens each layer's own embedding has, for which llama.cpp wants as many."""
    if tensor.name != "per_layer_token_embd.weight":
        return 0
    return max(0, model.tensors["token_embd.weight"].shape[0] - tensor.shape[0])


def _file_type(model: ModelFile) -> dict[str, Any]:
    nbytes: Counter[str] = Counter()
    for tensor in model.tensors.values():
        if len(tensor.shape) > 1:
            nbytes[tensor.type] += tensor.nbytes
    most = nbytes.most_common(1)[0][0] if nbytes else ""
    found = next((number for number, name in FILE_TYPES.items() if name == _MIXES.get(most, most)), None)
    return {} if found is None else {"general.file_type": found}


def _padded(model: ModelFile) -> dict[str, Any]:
    """The vocabulary with a text for each row of the embedding, which llama.cpp demands: [PAD377], of no use."""
    tokens, rows = model.metadata["tokenizer.ggml.tokens"], model.tensors["token_embd.weight"].shape[0]
    extra = range(len(tokens), rows)
    fill: dict[str, list[Any]] = {
        "tokens": [f"[PAD{i}]" for i in extra], "token_type": [UNUSED] * len(extra), "scores": [-1000.0] * len(extra),
    }  # fmt: skip
    keys = ((f"tokenizer.ggml.{name}", more) for name, more in fill.items() if extra)
    return {key: [*model.metadata[key], *more] for key, more in keys if key in model.metadata}


def _add(writer: Any, key: str, value: Any) -> None:
    """A key with the type that llama.cpp expects: whole numbers without a sign where they have none."""
    if key == _CHARSMAP:
        writer.add_array(key, bytes(value))
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32 if value < 1 << 32 else writer.add_uint64)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, Sequence) and len(value):
        writer.add_array(key, list(value))
