"""What names of hub models mean, in every spelling that people paste, and which files of a repository are models."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcli.errors import DownloadError, ModelError
from kvcli.runtime.hub import modelfiles, modelref
from kvcli.runtime.hub.hubnames import Reference, Variant, choose, matching, parse_reference, quant_of, variants

HOME = "https://huggingface.co/org/repo"


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("org/repo", ""),
        ("hf:org/repo", ""),
        ("hf://org/repo", ""),
        ("hf.co/org/repo", ""),
        ("HF.co/org/repo", ""),
        ("huggingface.co/org/repo", ""),
        (HOME, ""),
        (f"{HOME}/", ""),
        (f"{HOME}/tree/main", ""),
        ("https://hf.co/org/repo?show=files#top", ""),
        ("org/repo:latest", ""),
        ("org/repo:Q4_K_M", "Q4_K_M"),
        ("hf.co/org/repo:UD-Q4_K_XL", "UD-Q4_K_XL"),
        (f"{HOME}:iq4_xs", "iq4_xs"),
        (f"{HOME}/tree/main/Q4_K_M", "Q4_K_M"),
        ("org/repo/m.gguf", "m.gguf"),
        ("org/repo/sub/m.gguf", "sub/m.gguf"),
        ("org/repo:m.gguf", "m.gguf"),
        ("hf:org/repo/m.gguf", "m.gguf"),
        (f"{HOME}/resolve/main/m.gguf", "m.gguf"),
        (f"{HOME}/resolve/main/a%20b.gguf?download=true", "a b.gguf"),
        (f"{HOME}/blob/main/sub/m.gguf", "sub/m.gguf"),
    ],
)
def test_spellings(text: str, wanted: str) -> None:
    reference = parse_reference(text)
    assert reference == Reference("org/repo", wanted)
    assert parse_reference(str(reference)) == reference, "what hints say can be typed"
    assert not modelref.is_path(text)


@pytest.mark.parametrize("text", [f"{HOME}/resolve/v2/m.gguf", f"{HOME}/tree/v2"])
def test_revisions(text: str) -> None:
    reference = parse_reference(text)
    assert reference is not None and reference.revision == "v2" and parse_reference(str(reference)) == reference


def test_addresses_of_another_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    assert parse_reference("https://mirror.example/hub/org/repo/resolve/main/m.gguf") == Reference("org/repo", "m.gguf")


@pytest.mark.parametrize(
    "text", ["a", "a/b/c", "../b", "./b", "a/b:", "/a", "a b/c", "https://a/b", "https://example.org/a/b/m.gguf", ""]
)
def test_what_is_no_reference(text: str) -> None:
    assert parse_reference(text) is None


def test_addresses_elsewhere_are_told_apart_from_paths() -> None:
    with pytest.raises(ModelError, match="is not an address of a model on the hub") as caught:
        modelfiles.find_model("https://example.org/a/b/m.gguf")
    assert "give the path of a file" in caught.value.hint


def test_a_file_name_after_two_folders_may_be_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not modelref.is_path("org/repo/m.gguf") and modelref.is_path("repo/m.gguf") and modelref.is_path("m.gguf")
    (tmp_path / "org" / "repo").mkdir(parents=True)
    assert modelref.is_path("org/repo/m.gguf") and not modelref.is_path("hf:org/repo/m.gguf")


@pytest.mark.parametrize(
    "name, quant",
    [
        ("folder/m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m.i1-Q4_K_M.gguf", "i1-Q4_K_M"),
        ("m-IQ4_XS-imat.gguf", "IQ4_XS-imat"),
        ("m-imat-q4_k_m.gguf", "imat-Q4_K_M"),
        ("m-Q6_K_L.gguf", "Q6_K_L"),
        ("m.fp16.gguf", "F16"),
        ("m-bf16.gguf", "BF16"),
        ("m-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("m-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("q8_0.gguf", "Q8_0"),
        ("Q5_K_M/model.gguf", "Q5_K_M"),
        ("m-q5_0/model.gguf", "Q5_0"),
        ("Qwen3-8B.gguf", ""),
        ("phi-2.gguf", ""),
    ],
)
def test_quantizations_in_names(name: str, quant: str) -> None:
    assert quant_of(name) == quant


NAMES = [
    "m-Q4_K_M.gguf",
    "sub/m.Q8_0.gguf",
    "m-bf16.gguf",
    "m-UD-Q4_K_XL.gguf",
    "m-UD-Q4_K_M.gguf",
    "m-Q4_0_4_4.gguf",
    "m-Q6_K-00001-of-00002.gguf",
    "m-Q6_K-00002-of-00002.gguf",
    "m-Q5_K_M-00002-of-00002.gguf",
    "m-IQ3_M-imatrix.gguf",
    "mmproj-m-F16.gguf",
    "m-imatrix.gguf",
    "imatrix.dat",
    "README.md",
]
ALL = "Q4_K_M, Q8_0, BF16, UD-Q4_K_XL, UD-Q4_K_M, Q4_0_4_4, Q6_K, IQ3_M-imatrix"


def test_what_is_a_model() -> None:
    offered = variants(NAMES)
    assert ", ".join(variant.label for variant in offered) == ALL
    assert Variant("Q6_K", ("m-Q6_K-00001-of-00002.gguf", "m-Q6_K-00002-of-00002.gguf")) in offered


@pytest.mark.parametrize(
    "wanted, file",
    [
        ("", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q8_0", "sub/m.Q8_0.gguf"),
        ("m.Q8_0.gguf", "sub/m.Q8_0.gguf"),
        ("SUB/m.q8_0.gguf", "sub/m.Q8_0.gguf"),
        ("ud-q4_k_xl", "m-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        ("Q6_K", "m-Q6_K-00001-of-00002.gguf"),
        ("m-Q6_K-00002-of-00002.gguf", "m-Q6_K-00001-of-00002.gguf"),
        ("m-Q6_K.gguf", "m-Q6_K-00001-of-00002.gguf"),
        ("IQ3_M", "m-IQ3_M-imatrix.gguf"),
        ("BF16", "m-bf16.gguf"),
    ],
)
def test_choosing(wanted: str, file: str) -> None:
    assert choose(Reference("org/repo", wanted), variants(NAMES)).files[0] == file


@pytest.mark.parametrize(
    "wanted, error, message, hint",
    [
        ("Q4_K", DownloadError, "has no file for 'Q4_K'", f"there are {ALL}"),
        ("Q5_K_M", DownloadError, "has no file for 'Q5_K_M'", ALL),
        ("mmproj-m-F16.gguf", DownloadError, "'mmproj-m-F16.gguf' is not a model by itself", ALL),
        ("Q4_0_4_4", ModelError, "Q4_0_4_4 is an old format that no longer exists", "use org/repo:Q4_0"),
    ],
)
def test_what_cannot_be_chosen(wanted: str, error: type[Exception], message: str, hint: str) -> None:
    with pytest.raises(error, match=message) as caught:
        choose(Reference("org/repo", wanted), variants(NAMES))
    assert hint in caught.value.hint  # type: ignore[attr-defined]


def test_several_models_of_one_quantization_go_by_their_names() -> None:
    offered = variants(["a-Q8_0.gguf", "b-Q8_0.gguf", "b-Q6_K.gguf"])
    assert [variant.label for variant in offered] == ["a-Q8_0.gguf", "b-Q8_0.gguf", "Q6_K"]
    with pytest.raises(DownloadError, match="'q8_0' means several models of org/repo") as caught:
        choose(Reference("org/repo", "q8_0"), offered)
    assert caught.value.hint.endswith("there are a-Q8_0.gguf, b-Q8_0.gguf")
    assert choose(Reference("org/repo", "b-Q8_0.gguf"), offered).files == ("b-Q8_0.gguf",)


def test_one_model_needs_no_quantization() -> None:
    assert choose(Reference("org/repo"), variants(["only.gguf", "README.md"])).files == ("only.gguf",)
    assert choose(Reference("org/repo"), variants(["m.i1-Q4_K_M.gguf", "m.i1-Q6_K.gguf"])).label == "i1-Q4_K_M"
    with pytest.raises(DownloadError, match="has no Q4_K_M but several others"):
        choose(Reference("org/repo"), variants(["a-Q8_0.gguf", "b-Q6_K.gguf"]))


def test_what_is_here_answers_only_to_its_own_name() -> None:
    """Else a UD-Q4_K_M that is in the cache would hide the Q4_K_M of the repository."""
    here = variants(["m-UD-Q4_K_M.gguf"])
    assert matching(here, "Q4_K_M", loose=False) == matching(here, "", loose=False) == []
    assert matching(here, "UD-Q4_K_M", loose=False) == matching(here, "Q4_K_M") == here


def test_recipes_come_before_paths_and_these_before_repositories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    recipe = modelref.ModelRef.parse("SmolLM2")
    assert recipe.recipe is not None and recipe.recipe.name == "smollm2" and not recipe.is_path
    assert modelref.ModelRef.parse("org/repo:Q8_0").reference == Reference("org/repo", "Q8_0")
    (tmp_path / "org" / "repo").mkdir(parents=True)
    assert modelref.ModelRef.parse("org/repo").is_path and modelref.ModelRef.parse("none.gguf").is_path
    with pytest.raises(ModelError, match="no model named 'none'"):
        modelref.ModelRef.parse("none")


@pytest.mark.parametrize(
    ("names", "wanted", "why"),
    [
        (["m.Q6_K.gguf-split-a", "m.Q6_K.gguf-split-b"], "Q6_K", "it was cut into pieces such as m.Q6_K.gguf-split-a"),
        (["m-Q8_0.gguf.part1of2", "m-Q8_0.gguf.part2of2"], "q8_0", "write them one after the other into m-Q8_0.gguf"),
        (["Q4_K_M/m-Q4_K_M-00001-of-00003.gguf"], "", "1 of the 3 parts of Q4_K_M/m-Q4_K_M.gguf are there"),
        (["m-UD-Q4_K_XL-00002-of-00002.gguf"], "UD-Q4_K_XL", "1 of the 2 parts of m-UD-Q4_K_XL.gguf are there"),
    ],
)
def test_a_quantization_in_pieces_is_not_absent(names: list[str], wanted: str, why: str) -> None:
    with pytest.raises(DownloadError) as error:
        choose(Reference("org/repo", wanted), variants([*names, "m-Q2_K.gguf", "m-Q3_K.gguf"]), names)
    assert f"org/repo has no whole file for '{wanted or 'Q4_K_M'}': " in error.value.message
    assert why in error.value.message and "Q2_K, Q3_K" in (error.value.hint or "")


def test_a_quantization_in_whole_parts_is_one_model() -> None:
    """Whether the parts lie in a folder of the quantization's name, have it in their own, or both."""
    for name in ("UD-Q4_K_XL/m-UD-Q4_K_XL", "UD-Q4_K_XL/m", "m-UD-Q4_K_XL"):
        files = [f"{name}-{i:05d}-of-00002.gguf" for i in (1, 2)]
        for wanted in ("UD-Q4_K_XL", "ud-q4_k_xl", files[1]):
            found = choose(Reference("org/repo", wanted), variants([*files, "m-Q4_K_M.gguf"]), files)
            assert (found.label, found.files) == ("UD-Q4_K_XL", tuple(files))


def test_names_of_free_models_are_those_of_their_repositories() -> None:
    assert modelref.ModelRef.parse("qwen3-8b").reference == Reference("bartowski/Qwen_Qwen3-8B-GGUF")
    assert modelref.ModelRef.parse("qwen3-8b", planning=True).recipe is not None
    assert modelref.ModelRef.parse("llama-3.1-8b").reference is None  # its license has terms of its own
