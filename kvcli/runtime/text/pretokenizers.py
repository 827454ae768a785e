"""How text is cut into words before BPE, by the names that `tokenizer.ggml.pre` uses.

The wrong rule raises no error, it only makes answers worse, so an unknown name is refused. The expressions
are those of the models' own tokenizer.json, as transformers and llama.cpp document them for each name; what an
expression matches, down to code points without a character, is what the `tokenizers` package finds. No Unicode
normalization is applied: text comes back as it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcli.errors import ModelError


@dataclass(frozen=True)
class PreTokenizer:
    """Each step cuts the parts that the step before left; what a step does not match is a part too."""

    steps: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    spelled: bool = True  # in GPT-2's letters for bytes; else tokens are text, with U+2581 for spaces
    add_bos: bool = False  # where the file does not say


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HANGUL_AND_HAN = "[一-龥\u0800-一가-\ud7ff]+"
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_STOPS = "[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LINES = r"[^\n]+|[\n]+"
_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # 1234567 -> 1 234 567
# Letters that have a case, as the tokenizer.json of DeepSeek LLM lists them.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄ"
    "ῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


def _cased(without: str = "", suffix: str = "") -> str:
    """Words at whose capitals a new one begins: capitals before small letters, then capitals alone. `without`: letters
    that are in none; `suffix`: what may stand behind a word."""
    upper, lower = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return _any(f"{lead}{upper}*{lower}+{suffix}", f"{lead}{upper}+{lower}*{suffix}")


_GPT2 = PreTokenizer(
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
)
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", *_GPT2.steps))
_LLAMA3 = PreTokenizer((_any(_CONTRACTION, _WORD, r"\p{N}{1,3}", _SIGNS, _SPACES),))
_LLAMA3_WORDS = replace(_LLAMA3, ignore_merges=True)
_QWEN2 = PreTokenizer((_any(_CONTRACTION, _WORD, r"\p{N}", _SIGNS, _SPACES),))
_MAYBE_CONTRACTION = _CONTRACTION + "?"
_GPT4O = PreTokenizer((_any(_cased(suffix=_MAYBE_CONTRACTION), r"\p{N}{1,3}", _PATHS, _SPACES),))
_DEEPSEEK3_WORDS = _any(_ASCII_SIGN + "[A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+")
_DEEPSEEK3_TEXT = _any(_DEEPSEEK3_WORDS, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES)
_BLOOM = PreTokenizer((" ?" + _STOPS,))
_TEXT = PreTokenizer((), spelled=False)

_GROUPS: list[tuple[PreTokenizer, str]] = [
    (_GPT2, "gpt-2 phi-2 mpt olmo jais trillion exaone4 granite-docling gigachat a.x-4.0 mellum"),
    (_GPT2, "modern-bert roberta-bpe jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code"),
    (_DIGITS_GPT2, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_LLAMA3, "dbrx smaug-bpe chatglm-bpe"),
    (_LLAMA3_WORDS, "glm4 glm5"),
    (replace(_LLAMA3_WORDS, add_bos=True), "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (replace(_LLAMA3_WORDS, add_bos=True), "jina-v5-nano"),
    (_QWEN2, "qwen2 stablelm2 deepseek-r1-qwen megrez hunyuan grok-2 kormo solar-open f2llmv2"),
    (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2 talkie"),
    (PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3_TEXT)), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (_BLOOM, "bloom gpt3-finnish poro-chat"),
    (PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.steps)), "tiny_aya cohere2moe"),
    (PreTokenizer((*_BLOOM.steps, r"\p{N}")), "viking"),
    (PreTokenizer((_any(_cased(), r"\p{N}", _PATHS, _SPACES),), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_any(_WORD, r"\p{N}", _SIGNS, _SPACES),)), "ufakzeka"),
    (PreTokenizer((_LINES, *_QWEN2.steps)), "laguna"),
    (
        PreTokenizer(
            (
                _any(
                    r"'(?i:[sdmt]|ll|ve|re)",
                    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
                    r"\p{N}",
                    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
                    r"\s*[\r\n]|\s+(?!\S)|\s+",
                ),
            ),
        ),
        "bailingmoe bailingmoe2 llada-moe",
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
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HANGUL_AND_HAN, r"\p{N}")),
        "deepseek-coder",
    ),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _HANGUL_AND_HAN,
                r"\p{N}+",
            ),
        ),
        "deepseek-llm",
    ),
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2.steps, r"[0-9][0-9][0-9]")),
        "falcon",
    ),
    (
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                *_GPT2.steps,
            ),
            add_bos=True,
        ),
        "chameleon",
    ),
    (
        PreTokenizer((_any(r"\p{Han}+", _cased(r"&&[^\p{Han}]", _MAYBE_CONTRACTION), r"\p{N}{1,3}", _SIGNS, _SPACES),)),
        "kimi-k2",
    ),
    (PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
    (
        PreTokenizer(
            (
                _FROM_THE_RIGHT,
                "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ\u2f00-\u2fdf\u0e00-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
                _DEEPSEEK3_TEXT,
            )
        ),
        "afmoe",
    ),
    (
        PreTokenizer(
            (
                _any(
                    _CONTRACTION,
                    _WORD,
                    r"\p{N}{1,3}",
                    _SIGNS,
                    r"\s*[\r\n]+",
                    *(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)),
                    r"\s{1,2}(?!\S)",
                    r"\s{1}",
                ),
            )
        ),
        "jais-2",
    ),
    (
        PreTokenizer((r"\p{N}{1,3}", _CJK, _any(_DEEPSEEK3_WORDS, r" ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"), r"\p{N}")),
        "spark2_5",
    ),
    (
        PreTokenizer(
            (
                _any(
                    "[가-힣ㄱ-ㆎ]+",
                    "[！…“”‘’—：；，\u3001-〿︰-﹏]+",
                    "[ㄅ-ㄯ]+",
                    _CJK,
                ),
                _any(_cased(suffix=_MAYBE_CONTRACTION), r"\p{N}", _PATHS, _SPACES),
            ),
            ignore_merges=True,
        ),
        "youtu",
    ),
    (
        PreTokenizer(
            (
                _any(
                    _CONTRACTION,
                    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    r"\p{N}",
                    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    r"\s*[\r\n]|\s+(?!\S)|\s+",
                ),
            )
        ),
        "exaone-moe",
    ),
    (replace(_GPT4O, ignore_merges=True), "granite-embed-multi-97m"),
    (_TEXT, "gemma4 granite-embed-multi-311m sarvam-moe"),
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
