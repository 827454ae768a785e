"""The tokenizer and the chat template of a model's folder, as `transformers` has them, in the keys of a GGUF file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.formats.boundedjson import load_object
from kvcli.runtime.text import sentencemodel
from kvcli.runtime.text.foldernames import SENTENCEPIECE, SETTINGS, TOKENIZER
from kvcli.runtime.text.vocabulary import BYTE, BYTE_TEXTS, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED

Json = dict[str, Any]


def folder_metadata(folder: Path) -> Json:
    """`tokenizer.ggml.*` and `tokenizer.chat_template` for `Tokenizer.from_gguf` and `ChatTemplate.from_gguf`.

    `tokenizer.kv.split` has the rule that cuts words, which a GGUF file has as a name alone; `tokenizer.ggml.pre` is
    missing where no name stands for it. Raises ModelError for a folder without a tokenizer, for one of a kind that kv
    does not read, and for files that are damaged.
    """
    try:
        return _read(folder)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # something else than it should be
        what = f"the tokenizer of {folder.name} cannot be read: {type(error).__name__} ({str(error)[:80]})"
        raise ModelError(what, "a file is damaged, or is not what its name says") from None


def _read(folder: Path) -> Json:
    settings = _object(folder / SETTINGS)
    written = _object(folder / TOKENIZER)
    kind = written.get("model", {}).get("type") if written else None
    if (folder / SENTENCEPIECE).is_file() and not (kind == "Unigram" or (kind and _byte_level(written))):
        path = folder / SENTENCEPIECE
        metadata = sentencemodel.metadata_of(path.read_bytes(), path.name)
        added = _added_by_settings(folder, settings)
        metadata["tokenizer.ggml.add_bos_token"] = bool(settings.get("add_bos_token", True))
    elif written:
        metadata, added = _of_json(written), written.get("added_tokens") or []
        metadata["tokenizer.ggml.add_bos_token"] = _begins_with_token(written, settings)
    else:
        raise ModelError(
            f"{folder.name} has no tokenizer that kv reads", f"{TOKENIZER} or {SENTENCEPIECE} belongs into the folder"
        )
    _add_tokens(metadata, added)
    metadata |= _special_ids(folder, settings, metadata["tokenizer.ggml.tokens"])
    if metadata.get("tokenizer.ggml.bos_token_id") is None:
        metadata["tokenizer.ggml.add_bos_token"] = False
    return metadata | _templates(folder, settings)


def _object(path: Path) -> Json:
    """The JSON object in a file; {} where there is none."""
    return load_object(path.read_bytes(), path.name) if path.is_file() else {}


# --- tokenizer.json


def _of_json(written: Json) -> Json:
    """What its model says."""
    model = written.get("model") or {}
    kind = model.get("type")
    if kind == "BPE":
        return _bpe(written, model)
    if kind == "Unigram":
        return _unigram(written, model)
    raise ModelError(
        f"the tokenizer type {str(kind)[:60]!r} of {TOKENIZER} is not supported", "kv reads BPE and Unigram"
    )


def _bpe(written: Json, model: Json) -> Json:
    tokens, kinds = _by_id(model.get("vocab"))
    merges = model.get("merges") or []
    byte_level, unknown = _byte_level(written), model.get("unk_token")
    metadata: Json = {
        "tokenizer.ggml.model": "gpt2" if byte_level else "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }
    if unknown in tokens:
        metadata["tokenizer.ggml.unknown_token_id"] = tokens.index(unknown)
    if byte_level:
        from kvcli.runtime.text import bytebpe

        split = {"normalizer": written.get("normalizer"), "pre_tokenizer": written.get("pre_tokenizer")}
        split["ignore_merges"] = bool(model.get("ignore_merges"))
        metadata["tokenizer.kv.split"] = json.dumps(split)
        name = bytebpe.name_of(metadata["tokenizer.kv.split"])
        return metadata | ({"tokenizer.ggml.pre": name} if name else {})
    for i, token in enumerate(tokens):
        if token in BYTE_TEXTS:
            kinds[i] = BYTE
    return metadata | {"tokenizer.ggml.pre": "gemma4", "tokenizer.ggml.add_space_prefix": _puts_space(written)}


def _unigram(written: Json, model: Json) -> Json:
    pieces = model.get("vocab") or []
    unknown, tokens = model.get("unk_id"), [str(text) for text, _ in pieces]
    kinds = [BYTE if model.get("byte_fallback") and token in BYTE_TEXTS else NORMAL for token in tokens]
    metadata: Json = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(score) for _, score in pieces],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": _puts_space(written),
    }
    if isinstance(unknown, int) and 0 <= unknown < len(tokens):
        metadata["tokenizer.ggml.unknown_token_id"], kinds[unknown] = unknown, UNKNOWN
    steps = list(_parts(written.get("normalizer"), "normalizers"))
    for step in steps:
        if step.get("type") == "Precompiled" and step.get("precompiled_charsmap"):
            metadata["tokenizer.ggml.precompiled_charsmap"] = list(base64.b64decode(step["precompiled_charsmap"]))
    kinds_of_steps = {step.get("type") for step in [*steps, *_parts(written.get("pre_tokenizer"), "pretokenizers")]}
    extra = {"Precompiled", "Strip", "WhitespaceSplit"} & kinds_of_steps
    return metadata | {"tokenizer.ggml.remove_extra_whitespaces": bool(extra)}


def _by_id(vocab: Any) -> tuple[list[str], list[int]]:
    """Texts by id, and kinds: ids that none has are unused. Raises ModelError for what is no vocabulary."""
    if not isinstance(vocab, dict) or not vocab:
        raise ModelError(f"{TOKENIZER} has no vocabulary", "the file is damaged")
    return _filled({i: text for text, i in vocab.items()})


def _filled(texts: Mapping[int, str]) -> tuple[list[str], list[int]]:
    last = max(texts)
    if not all(type(i) is int and i >= 0 for i in texts) or last >= 8 * len(texts) + 4096:
        raise ModelError(f"{TOKENIZER} numbers its tokens from 0 to {last}, and has {len(texts):,}", "it is damaged")
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(last + 1)]
    return tokens, [NORMAL if i in texts else UNUSED for i in range(last + 1)]


def _parts(step: Any, inner: str) -> Iterator[Json]:
    """The steps of a normalizer, pre-tokenizer or post-processor, those of sequences one by one."""
    if isinstance(step, dict):
        if step.get("type") == "Sequence":
            for each in step.get(inner) or []:
                yield from _parts(each, inner)
        else:
            yield step


def _byte_level(written: Json) -> bool:
    return any(part.get("type") == "ByteLevel" for part in _parts(written.get("pre_tokenizer"), "pretokenizers"))


def _puts_space(written: Json) -> bool:
    """Whether text gets a space in front."""
    for part in _parts(written.get("normalizer"), "normalizers"):
        if part.get("type") == "Prepend" and part.get("prepend") == SPACE:
            return True
    for part in _parts(written.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "Metaspace":
            return part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never") != "never"
    return False


def _begins_with_token(written: Json, settings: Json) -> bool:
    """Whether a text gets a special token in front."""
    for part in _parts(written.get("post_processor"), "processors"):
        if part.get("type") == "TemplateProcessing":
            return "SpecialToken" in next(iter(part.get("single") or [{}]))
    return bool(settings.get("add_bos_token", False))


# --- other files


def _added_by_settings(folder: Path, settings: Json) -> list[Json]:
    """Tokens beside those of tokenizer.model, as tokenizer.json has them."""
    decoder = settings.get("added_tokens_decoder") or {}
    if not decoder:
        added = _object(folder / "added_tokens.json")
        return [{"id": i, "content": text, "special": False} for text, i in added.items()]
    return [{**token, "id": int(i)} for i, token in decoder.items()]


def _add_tokens(metadata: Json, added: list[Json]) -> None:
    """Put tokens that were added to a vocabulary where they stand, with their kinds."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens[:] = _filled(dict(enumerate(tokens)) | {token["id"]: token["content"] for token in added})[0]
    kinds += [UNUSED] * (len(tokens) - len(kinds))
    if (scores := metadata.get("tokenizer.ggml.scores")) is not None:
        scores += [-1000.0] * (len(tokens) - len(scores))
    for token in added:
        if kinds[token["id"]] not in (UNKNOWN, BYTE):
            kinds[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    if swallowing := [token["id"] for token in added if token.get("rstrip")]:
        metadata["tokenizer.kv.swallowing"] = swallowing


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _special_ids(folder: Path, settings: Json, tokens: list[str]) -> Json:
    """`tokenizer.ggml.*_token_id`: those that the settings name, and the ends that the model generates."""
    found: Json = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        text = _text(settings.get(f"{key}_token"))
        if isinstance(text, str) and text in tokens:
            found[f"tokenizer.ggml.{name}_token_id"] = tokens.index(text)
    ends: list[int] = []
    for file in ("generation_config.json", "config.json"):
        values = _object(folder / file)
        for name in ("bos", "eos"):
            given = values.get(f"{name}_token_id")
            ids = [
                i for i in (given if isinstance(given, list) else [given]) if type(i) is int and 0 <= i < len(tokens)
            ]
            if ids:
                found.setdefault(f"tokenizer.ggml.{name}_token_id", ids[0])
            ends += ids if name == "eos" else []
    others = [i for i in dict.fromkeys(ends) if i != found.get("tokenizer.ggml.eos_token_id")]
    return found | dict(zip(("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"), others, strict=False))


def _templates(folder: Path, settings: Json) -> Json:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` of others; the file of its own comes first."""
    given: Any = settings.get("chat_template")
    given = _object(folder / "chat_template.json").get("chat_template", given)
    if (path := folder / "chat_template.jinja").is_file():
        try:
            given = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{path.name} is not UTF-8 text", "the file is damaged") from None
    if isinstance(given, str):
        return {"tokenizer.chat_template": given}
    if not isinstance(given, list):
        return {}
    named = {str(each.get("name")): each.get("template") for each in given if isinstance(each, dict)}
    default = named.pop("default", None)
    others = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    return others | ({"tokenizer.chat_template": default} if default is not None else {})
