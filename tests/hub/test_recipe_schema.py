"""The schema of recipes: what parses, and that the shipped ones name every model once."""

from __future__ import annotations

import hashlib

import pytest
from toyworld import CONTENT, REPO, recipe_text

from kvcli.cli.flags.shared import DEFAULT_MODEL
from kvcli.runtime.hub import recipes
from kvcli.runtime.model.archs import RUNNABLE


def test_every_recipe_is_valid() -> None:
    recipes.load_recipes.cache_clear()
    known = recipes.load_recipes()
    assert {"smollm2", "gemma-3-270m"} <= set(known)
    names = [name for recipe in known.values() for name in (recipe.name, *recipe.aliases)]
    assert len(names) == len(set(names)), "a name means one model"
    files = {path.stem for path in recipes.recipe_folder().glob("*.toml")}
    assert files == set(known)
    assert [recipe.name for recipe in known.values() if recipe.default] == ["smollm2"]
    smollm2 = known["smollm2"]
    assert [type(source) for source in smollm2.sources] == [recipes.IndexSource, recipes.HubSource]
    assert smollm2.file is not None and smollm2.file.size == 98_362_432
    assert [r.name for r in recipes.load_recipes().values() if r.default] == [DEFAULT_MODEL]
    assert recipes.find_recipe("SmolLM2-135M") is smollm2


def test_what_the_shipped_recipes_are() -> None:
    """One base model, which says so in its title, too; what cannot run by name says why and what to do."""
    known = recipes.load_recipes()
    assert {recipe.kind for recipe in known.values()} == set(recipes.KINDS)
    assert [name for name, recipe in known.items() if recipe.kind == recipes.BASE] == ["gemma-3-270m"]
    assert "base model" in known["gemma-3-270m"].title
    assert [name for name, recipe in known.items() if recipe.file] == ["gemma-3-270m", "smollm2"]
    assert {known[name].problem for name in ("qwen3-8b", "phi-4-mini", "ministral-3-8b", "smollm2")} == {""}
    assert known["llama-3.1-8b"].problem == known["gemma-3-4b"].problem == "kv has no file of it to download"
    for recipe in known.values():
        runs = recipe.shape["arch"] in RUNNABLE
        assert bool(recipe.unsupported) is not runs
        assert not recipe.hf or (runs and recipe.file is None and recipe.hf in recipe.remedy)
        chats = ("chat", "-it-", "instruct", "qwen_qwen3-", "phi-4-", "-r1-", "qwq", "smollm3", "-0414", "gpt-oss")
        assert not recipe.hf or any(word in recipe.hf.lower() for word in chats)
    without = [name for name, recipe in known.items() if recipe.problem and not recipe.unsupported and not recipe.hf]
    # Of Mixtral, files in circulation have each expert by itself; of the others no repository is known to be right.
    assert without == [
        "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "granite-4.0-h-micro", "lfm2-1.2b", "mixtral-8x7b",
        "nemotron-3-nano-30b-a3b", "nemotron-h-8b", "nemotron-nano-9b-v2",
    ]  # fmt: skip


def test_order_is_by_family_and_size() -> None:
    names = list(recipes.load_recipes())
    wanted = [
        "deepseek-v2", "deepseek-v2-lite", "falcon-7b", "falcon-40b", "gemma-3-270m", "gemma-3-1b", "llama-3.1-8b",
        "llama-3.1-405b", "llama-3.2-1b", "mistral-7b-v0.1", "mistral-7b-v0.3", "mistral-nemo-12b", "qwen2.5-72b",
        "qwen3-0.6b", "qwen3-30b-a3b", "qwen3-235b-a22b", "smollm2", "smollm2-360m", "smollm2-1.7b", "tinyllama-1.1b",
    ]  # fmt: skip
    assert [name for name in names if name in wanted] == wanted


@pytest.mark.parametrize(
    "name, meant",
    [
        ("gemma3-270m", "gemma-3-270m"),
        ("Gemma_3-270M", "gemma-3-270m"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("llama3.1", "llama-3.1-8b"),
        ("mistral-7b", "mistral-7b-v0.3"),
        ("deepseek-r1", "deepseek-v3"),
        ("qwen3:30b", "qwen3-30b-a3b"),
        ("phi4", "phi-4"),
        ("smollm2:135m", "smollm2"),
    ],
)
def test_other_spellings(name: str, meant: str) -> None:
    found = recipes.find_recipe(name)
    assert found is not None and found.name == meant


def test_names_are_told_apart_without_their_hyphens() -> None:
    known = recipes.load_recipes().values()
    spelled = [(recipes._spelling(name), r.name) for r in known for name in (r.name, *r.aliases)]
    assert len({spelling for spelling, _ in spelled}) == len(set(spelled))


@pytest.mark.parametrize("name, close", [("qwen3-coder-30b", ["qwen3-coder-30b-a3b"]), ("llama-4-scout", []), ("", [])])
def test_similar_names(name: str, close: list[str]) -> None:
    assert recipes.find_recipe(name) is None
    assert [recipe.name for recipe in recipes.similar(name)][:1] == close


def test_what_runs_is_offered_first() -> None:
    found = [recipe.name for recipe in recipes.similar("gemma-3-27")]
    assert found[0] == "gemma-3-270m" and "gemma-3-27b" in found[1:]


@pytest.mark.parametrize(
    "old, new, what",
    [
        ('name = "toy"', 'name = "../toy"', "does not look like"),
        ('name = "toy.gguf"', 'name = "../../toy.gguf"', "does not look like"),
        ("size = 3", "size = -3", "size is"),
        ('sha256 = "', 'sha256 = "zz', "does not look like"),
        ('kind = "index"', 'kind = "ftp"', "has the kind 'ftp'"),
        ('version = "1.0"', 'version = "1.0 --pre"', "does not look like"),
        ('name = "toy-part0"', 'name = "-r"', "does not look like"),
        ("license", "licence", "unknown key 'licence'"),
        ('kind = "instruct"', 'kind = "chatty"', "does not look like base|instruct"),
        ("default = true", 'hf = "no-repository"', "does not look like"),
    ],
)
def test_a_recipe_that_is_not_valid(old: str, new: str, what: str) -> None:
    text = recipe_text(CONTENT)
    assert old in text
    with pytest.raises(ValueError, match=what):
        recipes.parse_recipe(recipes.tomllib.loads(text.replace(old, new, 1)))


@pytest.mark.parametrize(
    "old, new, what",
    [
        ("heads = 24", "heads = 0", "heads is 0"),
        ('kind = "mamba"', 'kind = "rwkv"', "does not look like mamba|conv"),
        ("kernel = 4", "kernel = 4\nbias = true", "unknown key 'bias'"),
        ("state = true", "state = true\nrows = 4", "unknown key 'rows'"),
        ("layers = 36\nkv_heads", "layers = 35\nkv_heads", "do not add up"),
    ],
)
def test_a_state_that_is_not_valid(old: str, new: str, what: str) -> None:
    text = (recipes.recipe_folder() / "falcon-h1-0.5b.toml").read_text("utf-8")
    assert old in text and recipes.parse_recipe(recipes.tomllib.loads(text))
    with pytest.raises(ValueError, match=what):
        recipes.parse_recipe(recipes.tomllib.loads(text.replace(old, new, 1)))


def test_a_source_may_have_its_own_file() -> None:
    other = hashlib.sha256(b"other").hexdigest()
    text = recipe_text(CONTENT, REPO).replace('file = "toy.gguf"', f'file = "toy.gguf"\nsize = 5\nsha256 = "{other}"')
    recipe = recipes.parse_recipe(recipes.tomllib.loads(text))
    assert [variant.size for variant in recipe.variants] == [len(CONTENT), 5]
