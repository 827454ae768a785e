"""The schema of recipes: what parses, and that the shipped ones name every model once."""

from __future__ import annotations

import hashlib

import pytest
from toyworld import CONTENT, REPO, recipe_text

from kvcli.flags import DEFAULT_MODEL
from kvcli.runtime.download import recipes


def test_every_recipe_is_valid() -> None:
    recipes.load_recipes.cache_clear()
    known = recipes.load_recipes()
    assert {"smollm2", "gemma3-270m"} <= set(known)
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
    ],
)
def test_a_recipe_that_is_not_valid(old: str, new: str, what: str) -> None:
    text = recipe_text(CONTENT)
    assert old in text
    with pytest.raises(ValueError, match=what):
        recipes.parse_recipe(recipes.tomllib.loads(text.replace(old, new, 1)))


def test_a_source_may_have_its_own_file() -> None:
    other = hashlib.sha256(b"other").hexdigest()
    text = recipe_text(CONTENT, REPO).replace('file = "toy.gguf"', f'file = "toy.gguf"\nsize = 5\nsha256 = "{other}"')
    recipe = recipes.parse_recipe(recipes.tomllib.loads(text))
    assert [variant.size for variant in recipe.variants] == [len(CONTENT), 5]
