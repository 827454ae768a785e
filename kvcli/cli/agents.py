"""How coding agents are told of a server: by variables of their environment and by words of their command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvcli.errors import UsageError

KEY = "KVCLI_KEY"  # the variable in which codex is told to look for the key


@dataclass(frozen=True)
class Place:
    """A server: its `url`, without a path, the `key` that it wants, and the model, with its context in tokens."""

    url: str
    key: str
    model: str
    ctx_size: int


@dataclass(frozen=True)
class Told:
    """What a program gets beside what the user gave it: `variables`, and `words` before those of the user."""

    variables: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def _claude(place: Place, before: Mapping[str, str]) -> Told:
    """Claude Code speaks Anthropic's interface, and asks for models of three sizes. A key in ANTHROPIC_API_KEY would be
    sent, too; the header in front of its system message changes with every version, and prompts with it."""
    sizes = ("ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    models = dict.fromkeys((*sizes, "ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"), place.model)
    where = {"ANTHROPIC_BASE_URL": place.url, "ANTHROPIC_AUTH_TOKEN": place.key, "ANTHROPIC_API_KEY": ""}
    return Told(where | models | {"CLAUDE_CODE_ATTRIBUTION_HEADER": "0"})


def _codex(place: Place, before: Mapping[str, str]) -> Told:
    """Codex speaks OpenAI's responses. It has no variable for the address, but options that stand above its file, in
    TOML, of which JSON's strings are a part."""
    provider = {"name": "kv", "base_url": f"{place.url}/v1", "wire_api": "responses", "env_key": KEY}
    options = {f"model_providers.kv.{name}": value for name, value in provider.items()}
    options |= {"model_provider": "kv", "model": place.model}
    words = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    words.append(f"model_context_window={place.ctx_size}")
    return Told({KEY: place.key}, tuple(word for each in words for word in ("-c", each)))


def _opencode(place: Place, before: Mapping[str, str]) -> Told:
    """OpenCode reads a variable with JSON as a file of options above its others. What the user has there stays."""
    try:
        found = json.loads(before.get("OPENCODE_CONFIG_CONTENT") or "{}")
        providers = found.get("provider", {}) | {}
    except (ValueError, AttributeError, TypeError):
        raise UsageError("OPENCODE_CONFIG_CONTENT is not a JSON object", "correct it, or unset it") from None
    model = {"name": place.model, "limit": {"context": place.ctx_size, "output": place.ctx_size // 4}}
    options = {"baseURL": f"{place.url}/v1", "apiKey": place.key}
    kv = {"npm": "@ai-sdk/openai-compatible", "name": "kv", "options": options, "models": {place.model: model}}
    names = dict.fromkeys(("model", "small_model"), f"kv/{place.model}")
    return Told({"OPENCODE_CONFIG_CONTENT": json.dumps({**found, "provider": {**providers, "kv": kv}, **names})})


AGENTS: dict[str, Callable[[Place, Mapping[str, str]], Told]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
}
