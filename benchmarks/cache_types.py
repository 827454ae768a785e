"""What each cache type costs and keeps: the tables of docs/cache-types.md, measured with `kv perplexity` and written
there, and the short one of README.md, which is made of them.

    python benchmarks/cache_types.py TEXT_FILE... [--model TITLE=MODEL]... [--check]

Of each text the first 4 chunks of 1,024 tokens are read, each from an empty cache, and positions 256 to 1,022 are
scored; all types read the same chunks in lock-step. A chunk begins with BOS where the model adds one. Texts of any
kind will do; the figures depend on them. `--check` changes nothing and exits with 1 if the tables there are others.
Prints the tables, and one JSON line last. Takes about 10 minutes on 2 slow cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.evaluate import quality
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.hub import modelfiles
from kvcli.runtime.model.archs import from_gguf

ROOT = Path(__file__).resolve().parent.parent
PAGE, README = ROOT / "docs" / "cache-types.md", ROOT / "README.md"
CHUNK, CHUNKS, SCORE_FROM = 1024, 4, 256
MODELS = ("SmolLM2 135M=smollm2", "Gemma 3 270M=gemma-3-270m")
PROTOCOL = ("-c", str(CHUNK), "--chunks", str(CHUNKS), "--score-from", str(SCORE_FROM))
# Cache types, and pages of the 16-bit tail.
RUNS = (("f16,int8,fp8,int8/int5,int8/int4,int5,int6/int4,int5/int4,int4", 1), ("int4", 0))
ENVIRONMENT = os.environ | {"KV_CONFIG": "none"}  # settings of the user do not count
LONG = 8192  # tokens of the second average of bits
HEAD = (
    f"| {{title}} | bits | of a cache of {CHUNK:,} | of {LONG:,} | KL divergence | same first choice | perplexity |\n"
    "|---|---:|---:|---:|---:|---:|---:|\n"
)


def measure(model: str, texts: list[str]) -> list[dict[str, Any]]:
    """Every type's entry of `kv perplexity --json`, with its tail and its average bits in a long cache."""
    files = [word for text in texts for word in ("-f", text)]
    with GGUFFile.open(modelfiles.find_model(model)) as file:
        config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    rows = []
    for types, tail in RUNS:
        flags = ["-m", model, *PROTOCOL, *files, "-ct", types, "--kv-tail", str(tail), "--json"]
        command = [sys.executable, "-m", "kvcli", "perplexity", *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=ENVIRONMENT)
        if done.returncode:
            sys.exit(f"kv perplexity failed with exit code {done.returncode}: {done.stdout}")
        for row in json.loads(done.stdout)["types"]:
            layout = KVLayout.build(config, row["type_k"], row["type_v"], tail=tail)
            if tail or row["type_k"] != "f16":
                rows.append({**row, "kv_tail": tail, "bits_long": quality.cost(layout, LONG).bits})
    return rows


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    text = HEAD.format(title=title)
    for row in rows:
        name = row["type_k"] if row["type_k"] == row["type_v"] else f"{row['type_k']}/{row['type_v']}"
        name += "" if row["kv_tail"] else ", `--kv-tail 0`"
        kept = "" if name == "f16" else f"{row['kld']:.5f} ± {row['kld_error']:.5f} | {row['top1']:.2f} %"
        bits = " | ".join(f"{row[each]:.2f}" for each in ("sealed_bits", "bits", "bits_long"))
        text += f"| {name} | {bits} | {kept or '0 | 100 %'} | {row['ppl']:.2f} |\n"
    return text


def summary(page: str) -> str:
    """Of the tables in the text of docs/cache-types.md: a few columns for each model, a row for each type that all were
    measured with."""
    titles: list[str] = []
    rows: dict[str, list[str]] = {}
    for line in _block("cache-types").search(page)[1].splitlines():  # type: ignore[index]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 2 or cells[0].startswith("---") or "--kv-tail" in cells[0]:
            continue
        if cells[1] == "bits":
            titles.append(cells[0])
        else:
            name, bits, _, _, divergence, same, _ = cells
            rows.setdefault(name, []).extend((bits, divergence.partition(" ")[0], same))
    columns = [f"{title}: bits | KL divergence | same" for title in titles]
    head = f"| cache type | {' | '.join(columns)} |\n|---{'|---:' * 3 * len(titles)}|\n"
    whole = ((name, cells) for name, cells in rows.items() if len(cells) == 3 * len(titles))
    return head + "".join(f"| {name} | {' | '.join(cells)} |\n" for name, cells in whole)


def _block(name: str) -> re.Pattern[str]:
    """A part of a page between its markers."""
    return re.compile(rf"<!-- {name} -->\n(.*?)<!-- end -->", re.S)


def written(text: str, name: str, content: str) -> str:
    """The text of a page with this part of it replaced."""
    return _block(name).sub(lambda _: f"<!-- {name} -->\n{content}<!-- end -->", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", metavar="TEXT_FILE")
    parser.add_argument("--model", action="append", help="a name or a file, and its title; one table each")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    models = [each.partition("=")[::2] for each in options.model or MODELS]
    found = {title: measure(model, options.texts) for title, model in models}
    tables = "\n".join(table(title, rows) for title, rows in found.items())
    old_page, old_readme = PAGE.read_text("utf-8"), README.read_text("utf-8")
    page = written(old_page, "cache-types", tables)
    readme = written(old_readme, "cache-types-short", summary(page))
    print(tables)
    print(json.dumps({"chunk": CHUNK, "chunks": CHUNKS, "score_from": SCORE_FROM, "models": found}))
    if options.check:
        sys.exit((page, readme) != (old_page, old_readme))
    PAGE.write_text(page, "utf-8")
    README.write_text(readme, "utf-8")


if __name__ == "__main__":
    main()
