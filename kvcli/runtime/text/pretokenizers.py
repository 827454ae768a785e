"""How text is cut into words before byte-level BPE, by the names that `tokenizer.ggml.pre` uses.

The wrong rule raises no error, it only makes answers worse, so an unknown name is refused. The expressions
are those of the models' own tokenizer.json, as transformers and llama.cpp document them for each name. Left
out: rules that are more than expressions (kimi-k2, afmoe, gemma4, chameleon), deepseek-llm, and embedding
models. No Unicode normalization is applied: text comes back as it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcli.errors import ModelError


@dataclass(frozen=True)
class PreTokenizer:
    """Each step cuts the parts that the step before left; what a step does not match is a part too."""

    steps: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # where the file does not say


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"]
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_STOPS = "[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


_GPT2 = PreTokenizer(
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
)
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", *_GPT2.steps))
_LLAMA3 = PreTokenizer((_any(_CONTRACTION, _WORD, r"\p{N}{1,3}", _SIGNS, _SPACES),))
_LLAMA3_BOS = replace(_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_any(_CONTRACTION, _WORD, r"\p{N}", _SIGNS, _SPACES),))
_GPT4O = PreTokenizer(
    (_any(*(cased + _CONTRACTION + "?" for cased in _CASED), r"\p{N}{1,3}", _PATHS, _SPACES),),
)
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        _CJK,
        _any(
            _ASCII_SIGN + "[A-Za-z]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            _SPACES,
        ),
    ),
)
_BLOOM = PreTokenizer((" ?" + _STOPS,))
_BAILING = PreTokenizer(
    (
        _any(
            r"'(?i:[sdmt]|ll|ve|re)",
            r"[^\r\n\p{L}\p{N}]?+\p{L}+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
)
_TINY_AYA = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.steps))

_GROUPS: list[tuple[PreTokenizer, str]] = [
    (_GPT2, "gpt-2 phi-2 mpt olmo jais trillion exaone4 granite-docling gigachat a.x-4.0 mellum"),
    (_DIGITS_GPT2, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_LLAMA3, "dbrx smaug-bpe glm4 chatglm-bpe"),
    (_LLAMA3_BOS, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_QWEN2, "qwen2 stablelm2 deepseek-r1-qwen megrez hunyuan grok-2 kormo solar-open"),
    (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (_BLOOM, "bloom gpt3-finnish poro-chat"),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (_TINY_AYA, "tiny_aya cohere2moe"),
    (PreTokenizer((" ?" + _STOPS, r"\p{N}")), "viking"),
    (
        PreTokenizer((_any(*_CASED, r"\p{N}", _PATHS, _SPACES),), ignore_merges=True, add_bos=True),
        "tekken",
    ),
    (
        PreTokenizer(
            (
                _any(
                    _CONTRACTION,
                    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                    r"\p{N}",
                    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                    _SPACES,
                ),
            ),
        ),
        "qwen35",
    ),
    (
        PreTokenizer((_any(_CONTRACTION, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES),)),
        "seed-coder",
    ),
    (
        PreTokenizer((r"\p{N}{1,3}", _any(_CONTRACTION, _WORD, r"\p{N}+", _SIGNS, _SPACES)), ignore_merges=True),
        "minicpm5",
    ),
    (
        PreTokenizer(
            (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}"),
        ),
        "deepseek-coder",
    ),
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2.steps, r"[0-9][0-9][0-9]")),
        "falcon",
    ),
]
PRETOKENIZERS = {name: rule for rule, names in _GROUPS for name in names.split()}


def find_pretokenizer(name: str | None, force: bool = False) -> PreTokenizer:
    """The rule called `name`. With `force` GPT-2's stands in for a missing, 'default' or unknown name.

    Raises ModelError that names it otherwise.
    """
    if name in PRETOKENIZERS:
        return PRETOKENIZERS[name]
    if force:
        return _GPT2
    if name in (None, "", "default"):
        what = "the file does not say how text is cut into words (tokenizer.ggml.pre is missing)"
        if name == "default":
            what = "the file does not say how text is cut into words (tokenizer.ggml.pre is 'default')"
    else:
        what = f"unknown pre-tokenizer {str(name)[:60]!r} (tokenizer.ggml.pre)"
    raise ModelError(what, "get a newer conversion of the model, or accept worse answers (`force_pretokenizer`)")
