"""`SafetensorsModel`: a folder with config.json, safetensors and a tokenizer as the GGUF file that it could be."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.blockformats import FORMATS
from kvcli.errors import ModelError
from kvcli.runtime.formats import safetensors
from kvcli.runtime.formats.boundedjson import load_object
from kvcli.runtime.formats.ggufheader import TensorInfo
from kvcli.runtime.formats.ggufvalues import DAMAGED, quote
from kvcli.runtime.formats.localfile import LocalFile
from kvcli.runtime.formats.modelfile import ModelFile
from kvcli.runtime.headers.hfkeys import config_of, metadata_of
from kvcli.runtime.headers.modelheaders import MAX_CONFIG_BYTES, document
from kvcli.runtime.hub import hubcache
from kvcli.runtime.text import foldertokenizer as texts
from kvcli.runtime.text.foldernames import CONFIG, FILES
from kvcli.words import human_bytes

if TYPE_CHECKING:
    import numpy as np

    from kvcli.runtime.headers.presented import Presented

_SAMPLING_KEYS = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError if it is missing, too large or no object."""
    return load_object(document(LocalFile(path), MAX_CONFIG_BYTES), str(path))


class SafetensorsModel(ModelFile):
    """An open, checked folder. Tensors are read one at a time; those that lie there as presented stay mapped.

    `otherwise`: matrices that are not packed as was asked for, since their rows are no whole blocks, and their types.
    """

    def __init__(self, folder: Path, quantize: str = "") -> None:
        """`quantize`: the block format that matrices are packed in ("Q8_0", "Q4_K"), "" = as they are.

        Raises ModelError: a file is missing or damaged, the model is of a kind that kv cannot present.
        """
        opened, weight_map = safetensors.weight_files(folder)
        headers = {name: safetensors.parse_header(x.buffer, x.size, x.label) for name, x in opened.items()}
        merged = safetensors.merge_shards(headers, weight_map, str(folder))
        where = {name: file for file, header in headers.items() for name in header.tensors}
        if not (folder / CONFIG).exists():
            raise ModelError(f"{folder} has no {CONFIG} beside its weights", "download the whole model")
        config = read_object(folder / CONFIG)
        beside = [folder / name for name in (CONFIG, *FILES) if (folder / name).is_file()]
        super().__init__(
            folder, list(dict.fromkeys([*(folder / name for name in opened), *beside])), list(opened.values())
        )
        self._opened, self._where, self._stored, self.form = opened, where, merged, quantize
        self.otherwise: dict[str, str] = {}
        self._metadata = {**self._described(folder, config), **self._text(folder)}
        self._presented = self._present(merged, config, quantize)
        self._infos = {name: _info(tensor) for name, tensor in self._presented.items()}
        self._count_ahead()
        if quantize:
            self._metadata["general.quantization_version"] = 2

    def _described(self, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of the model."""
        return {**metadata_of(config), **_general(folder, config)}

    def _text(self, folder: Path) -> dict[str, Any]:
        """The keys of tokenizer and chat template."""
        return texts.folder_metadata(folder)

    def _count_ahead(self) -> None:
        """Layers that predict further tokens are counted where the folder has them: configs name them all the same."""
        arch = self._metadata["general.architecture"]
        count, ahead = f"{arch}.block_count", f"{arch}.nextn_predict_layers"
        while f"blk.{self._metadata[count]}.nextn.eh_proj.weight" in self._infos:
            self._metadata[count] += 1
            self._metadata[ahead] = self._metadata.get(ahead, 0) + 1

    def _present(
        self, merged: Mapping[str, safetensors.TensorInfo], config: Mapping[str, Any], quantize: str
    ) -> dict[str, Presented]:
        from kvcli.runtime.formats.packedweights import sources_of
        from kvcli.runtime.headers.hfarithmetic import check_arithmetic
        from kvcli.runtime.headers.hftensors import check_runs, present

        sizes = config_of(config)
        check_runs(sizes)
        check_arithmetic(sizes)
        sources = sources_of(merged, self._raw, config)
        presented = present(sources, config, sizes)
        layouts = sorted({source.layout for source in sources.values() if source.layout != "plain"})
        if layouts:
            into = quantize or next(x.type for x in sources.values() if x.layout != "plain")
            self.notices.append(self._told(" and ".join(layouts), into, presented, quantize))
        return self._quantized(presented, quantize) if quantize else presented

    def _quantized(self, presented: Mapping[str, Presented], type: str) -> dict[str, Presented]:
        from kvcli.runtime.formats.packing import narrower_notice, stored_otherwise
        from kvcli.runtime.headers.hftensors import quantized

        self.otherwise = stored_otherwise({name: (x.shape, x.type) for name, x in presented.items()}, type)
        if notice := narrower_notice(self.otherwise, type):
            self.notices.append(notice)
        return quantized(presented, type)

    def _told(self, layouts: str, into: str, presented: Mapping[str, Presented], quantize: str) -> str:
        nbytes = sum(_info(tensor).nbytes for tensor in presented.values())
        if quantize:
            return (
                f"the weights are stored as {layouts}; they are unpacked and packed again as {into} while they are read"
            )
        more = f"{human_bytes(nbytes)} in memory, {human_bytes(self.size)} in the folder"
        return f"the weights are stored as {layouts}, and unpacked to {into}: {more} (`quantize` packs them)"

    def _raw(self, tensor: safetensors.TensorInfo) -> np.ndarray:
        """The bytes of a tensor in the folder: a view."""
        import numpy as np

        self.open_files()  # raises where they are closed
        return np.frombuffer(self._opened[self._where[tensor.name]].buffer, np.uint8, tensor.nbytes, tensor.offset)

    def stored(self) -> Mapping[str, safetensors.TensorInfo]:
        return self._stored

    def stored_bytes(self, name: str) -> np.ndarray:
        return self._raw(self._stored[name])

    @property
    def metadata(self) -> dict[str, Any]:
        return self._metadata

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> np.ndarray:
        """A view of the mapped file, or the bytes as they are made."""
        import numpy as np

        self.open_files()
        tensor = self._presented.get(name)
        if tensor is None:
            raise ModelError(f"{self.path} has no tensor {quote(name)}", DAMAGED)
        values = np.ascontiguousarray(tensor.read())
        return values.reshape(-1).view(np.uint8)


def _info(tensor: Presented) -> TensorInfo:
    form = FORMATS[tensor.type]
    return TensorInfo(tensor.name, tensor.shape, tensor.type, 0, prod(tensor.shape) // form.elements * form.bytes)


def _general(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a GGUF file says of the model as a whole."""
    name = hubcache.repository_of(folder).rpartition("/")[2] or folder.resolve().name
    found: dict[str, Any] = {"general.type": "model", "general.name": name}
    path = folder / "generation_config.json"
    settings = read_object(path) if path.is_file() else {}
    for name, key in _SAMPLING_KEYS.items():
        value = settings.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and settings.get("do_sample", True):
            found[f"general.sampling.{key}"] = value
    return found
