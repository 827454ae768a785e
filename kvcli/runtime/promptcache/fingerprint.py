"""What the rows of a cache depend on, as strings that can be compared. No torch.

A model is known by its content. The hash of its tensors' bytes takes a second per gigabyte or so; it is kept for the
file's (path, size, times of change, inode), all of which the system sets anew when the file is written to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvcli import paths
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.formats.adapter import Adapter
from kvcli.runtime.formats.modelfile import ModelFile
from kvcli.runtime.host.cores import usable_cpus
from kvcli.runtime.promptcache.sameness import APART, ONCE, VALUES

_BLOCK = 8 << 20
_TEXT_HASHES = ("tokenizer", "template")
LAYOUT_FIELDS = ("cache_type_k", "cache_type_v", "page_size", "sinks", "tail")  # of which a file may be converted


def identity(file: ModelFile, adapters: Sequence[Adapter], config: ModelConfig, layout: KVLayout) -> dict[str, str]:
    """Every field that must be the same where rows are to be used again, in the order in which they are compared."""
    return {
        **_with(adapters, model_hashes(file)),
        "model_config": _canonical(_shape_of(config)),
        **layout_fields(layout),
        **({VALUES: ONCE if layout.joined else APART} if any(layer.turned for layer in config.layers) else {}),
        "positions": "absolute from 0",
        "byte_order": sys.byteorder,
    }


def _shape_of(config: ModelConfig) -> dict[str, Any]:
    """All fields of a config but its name, and what follows from its architecture."""
    fields = dataclasses.asdict(dataclasses.replace(config, name=""))
    del fields["block"]
    for layer in fields["layers"]:
        for name in ("mixer", "turned"):
            if not layer[name]:  # as before there were any
                del layer[name]
    return fields


def layout_fields(layout: KVLayout) -> dict[str, str]:
    """The fields that the cache options decide."""
    groups, retention = layout.groups, layout.retention
    return {
        "cache_type_k": " ".join(group.types[0] for group in groups),
        "cache_type_v": " ".join(group.types[1] for group in groups),
        "page_size": str(layout.page_size),
        "sinks": " ".join(str(group.sinks if group.sealed else 0) for group in groups),
        "tail": " ".join(str(group.tail if group.sealed else 0) for group in groups),
        "eviction": retention.identity if retention else "none",
        **({"states": "f32"} if layout.states else {}),
    }


def model_hashes(file: ModelFile) -> dict[str, str]:
    """Hashes of the weights, the tokenizer and the chat template of a model; its files are read only once."""
    key = _stamp(file)
    hashes = _recorded(file.path, key)
    if hashes is None:
        hashes = {"weights": _weights_hash(file), **_text_hashes(file.metadata)}
        if _stamp(file) == key:
            _keep(_record(file.path), {"file": key, "hashes": hashes, "path": os.path.abspath(file.path)})
    return hashes


def model_with(weights: str) -> Path | None:
    """Where a model lies whose weights have this hash, among those that were opened here; None = it is not known, or
    gone."""
    for record in (paths.cache_dir() / "fingerprints").glob("*.json"):
        try:
            kept = json.loads(record.read_text("utf-8"))
            if kept["hashes"]["weights"] == weights and (path := Path(kept["path"])).exists():
                return path
        except (OSError, ValueError, LookupError, TypeError):
            continue  # of an earlier version, or damaged
    return None


def _with(adapters: Sequence[Adapter], hashes: dict[str, str]) -> dict[str, str]:
    """The hashes of a model whose weights are changed by adapters: of other weights, as far as rows are concerned."""
    changes = [
        [model_hashes(each.file)["weights"], sorted((name, pair.scale) for name, pair in each.pairs.items())]
        for each in adapters
    ]
    return hashes | {"weights": _sha256([hashes["weights"], changes])} if changes else hashes


def text_hashes(file: ModelFile) -> dict[str, str]:
    """The hashes of `model_hashes` that decide which token ids a text has; no weights are read for them."""
    hashes = _recorded(file.path, _stamp(file)) or _text_hashes(file.metadata)
    return {name: hashes[name] for name in _TEXT_HASHES}


def _recorded(path: Path, key: list[Any]) -> dict[str, str] | None:
    """The hashes on record for a model's files with the stamp `key`; None = there are none."""
    try:
        kept = json.loads(_record(path).read_text("utf-8"))
        if kept["file"] == key and "path" in kept and set(kept["hashes"]) == {"weights", *_TEXT_HASHES}:
            return {name: str(value) for name, value in kept["hashes"].items()}
    except (OSError, ValueError, LookupError, TypeError):
        pass  # mostly: not there yet
    return None


def _record(path: Path) -> Path:
    name = hashlib.sha256(os.path.realpath(path).encode("utf-8", "surrogateescape")).hexdigest()[:40]
    return paths.cache_dir() / "fingerprints" / f"{name}.json"


def _stamp(file: ModelFile) -> list[Any]:
    stamp: list[Any] = [file.form] if file.form else []
    for path in file.paths:
        status = os.stat(path)
        stamp += [os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    return stamp


def _keep(record: Path, value: dict[str, Any]) -> None:
    """A record that cannot be kept is made again next time."""
    try:
        paths.make_private(record.parent)
        paths.replace_file(record, json.dumps(value).encode())
    except OSError:
        return


def tokenizer_hash(metadata: Mapping[str, Any]) -> str:
    """Of everything in a file's metadata that makes ids of text."""
    return _sha256({k: v for k, v in metadata.items() if k.startswith(("tokenizer.ggml.", "tokenizer.kv."))})


def _text_hashes(metadata: Mapping[str, Any]) -> dict[str, str]:
    template = {k: v for k, v in metadata.items() if k.startswith("tokenizer.chat_template")}
    return {"tokenizer": tokenizer_hash(metadata), "template": _sha256(template)}


def _weights_hash(file: ModelFile) -> str:
    stored = file.stored()
    tensors = [stored[name] for name in sorted(stored)]
    with ThreadPoolExecutor(len(usable_cpus())) as threads:
        digests = list(threads.map(lambda t: _digest(file, t.name), tensors))
    file.check()
    described = [[t.name, list(t.shape), t.type, digest] for t, digest in zip(tensors, digests, strict=True)]
    return _sha256([file.form, described] if file.form else described)


def _digest(file: ModelFile, name: str) -> str:
    data, digest = memoryview(file.stored_bytes(name).data).cast("B"), hashlib.blake2b(digest_size=32)
    for start in range(0, len(data), _BLOCK):
        digest.update(data[start : start + _BLOCK])
    return digest.hexdigest()


def _sha256(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=list)
