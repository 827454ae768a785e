"""Answers under JSON schemas: random schemas, each asked of a model, and what the grammar costs a token.

    python benchmarks/schemas.py MODEL [--count 500] [--seed 1] [--max-tokens 120]

Every answer that ends by itself is validated by the `jsonschema` package. In as many schemas again one part is made
wrong: the refusal has to name its path. Times are of the grammar alone: compiling it, and for each token the mask.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jsonschema

import kvcli
from kvcli.errors import UsageError
from kvcli.runtime.text import grammar

Schema = dict[str, Any]
NAMES = ("name", "id", "a b", "Größe", "tags", "x_1", "when", "0")
PATTERNS = ("^[a-c]{2,4}$", "^[A-Z][a-z]+$", r"^\d{3}-\d{4}$", "^(yes|no)?$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def schema(draw: random.Random, depth: int = 3) -> Schema:
    """One of the kinds that people write."""
    plain: list[Callable[[], Schema]] = [
        lambda: {"type": draw.choice(["boolean", "null", "string", "integer", "number"])},
        lambda: {"type": "integer", "minimum": draw.randint(-20, 0), "maximum": draw.randint(1, 10**6)},
        lambda: {"type": "number", "exclusiveMinimum": 0, "maximum": draw.choice([1, 2.5, 100])},
        lambda: {"enum": draw.sample(["red", "grün", 7, None, True, [1, 2], {"a": 1}], 3)},
        lambda: {"const": draw.choice(["x", 0, False, {"k": ["v"]}])},
        lambda: {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(3, 9)},
        lambda: {"type": "string", "pattern": draw.choice(PATTERNS)},
        lambda: {"type": "string", "format": draw.choice(FORMATS)},
    ]
    nested: list[Callable[[], Schema]] = [
        lambda: _object(draw, depth - 1),
        lambda: _object(draw, depth - 1),
        lambda: {"type": "array", "items": schema(draw, depth - 1), "minItems": 0, "maxItems": draw.randint(1, 4)},
        lambda: {"anyOf": [schema(draw, depth - 1), schema(draw, depth - 1)]},
        lambda: {"type": ["null", "integer"]},
    ]
    return draw.choice(nested if depth == 3 or (depth > 0 and draw.random() < 0.6) else plain)()


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(1, 4))
    found: Schema = {"type": "object", "properties": {name: schema(draw, depth) for name in names}}
    found["required"] = draw.sample(names, draw.randint(0, len(names)))
    if draw.random() < 0.2:
        found["$defs"] = {"node": {"type": "object", "properties": {"next": {"type": "integer"}}, "required": ["next"]}}
        found["properties"]["node"] = found["$defs"]["node"]
    return found | ({"additionalProperties": False} if draw.random() < 0.7 else {})


WRONG: tuple[Schema, ...] = (
    {"type": "strin"}, {"pattern": "("}, {"minimum": "a"}, {"properties": 5}, {"$ref": "#/$defs/nowhere"},
    {"type": "array", "uniqueItems": True}, {"not": {"type": "string"}}, {"enum": 3},
)  # fmt: skip


def spoiled(draw: random.Random, whole: Schema) -> tuple[Schema, str]:
    """The schema with one part that is wrong, and the path of that."""
    part, path = whole, "$"
    while True:
        inner: list[tuple[Any, Any, str]] = [
            (part["properties"], name, f"{path}.properties.{name}") for name in part.get("properties", {})
        ]
        inner += [(part, "items", f"{path}.items")] if "items" in part else []
        inner += [(part["anyOf"], number, f"{path}.anyOf[{number}]") for number in range(len(part.get("anyOf", ())))]
        if not inner:
            return {"anyOf": [whole, draw.choice(WRONG)]}, "$.anyOf[1]"
        holder, key, path = draw.choice(inner)
        if draw.random() < 0.5 or not set(holder[key]) & {"properties", "items", "anyOf"}:
            holder[key] = draw.choice(WRONG)
            return whole, path
        part = holder[key]


def refused(draw: random.Random) -> str:
    """Of one wrong schema: "" = refused with its path, else what was told."""
    wrong, path = spoiled(draw, schema(draw))
    try:
        grammar.json_schema(wrong)
    except UsageError as error:
        return (
            ""
            if f" at {path}: " in f"{error.message} " or f" at {path}." in error.message
            else f"{path}: {error.message}"
        )
    return f"{path}: taken: {json.dumps(wrong)}"


def costs(source: str, ids: list[int], model: Any) -> tuple[float, list[float]]:
    """Seconds to compile, and for each token of an answer."""
    engine = model._open()
    grammar._MATCHERS.clear()  # or the one of the answer would be copied
    began = time.perf_counter()
    constraint = grammar.Constraint(source, engine.tokenizer, engine.config.vocab_size)
    compiled, each = time.perf_counter() - began, []
    for token in ids:
        if token in engine.tokenizer.eog_ids:
            break
        began = time.perf_counter()
        constraint.allowed()
        constraint.accept(token)
        each.append(time.perf_counter() - began)
    return compiled, each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=120)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    model = kvcli.load(given.model, ctx=1024)
    whole, cut, invalid, compiled, masks = 0, 0, list[str](), list[float](), list[float]()
    for number in range(given.count):
        wanted = schema(draw)
        source = grammar.json_schema(wanted)
        answer = model.generate(
            "An example as JSON:", grammar=source, temperature=1.0, seed=number, max_tokens=given.max_tokens
        )
        text = answer.text
        took, each = costs(source, answer.ids, model)
        compiled.append(took)
        masks += each
        if answer.finish_reason != "stop":
            cut += 1
            continue
        whole += 1
        try:
            jsonschema.validate(json.loads(text), wanted)
        except (ValueError, jsonschema.ValidationError) as error:
            invalid.append(f"{json.dumps(wanted)}: {text!r}: {error}")
    missed = [told for told in (refused(draw) for _ in range(given.count)) if told]
    for told in [*invalid, *missed]:
        print(told)
    micro = sorted(1e6 * each for each in masks)
    print("| schemas | whole answers | of these invalid | cut by the limit | wrong ones refused with their path |")
    print("|---:|---:|---:|---:|---:|")
    print(f"| {given.count} | {whole} | {len(invalid)} | {cut} | {given.count - len(missed)} of {given.count} |")
    print(
        "\n| vocabulary | compile, median | worst | a token, median | 99 % | worst |\n|---:|---:|---:|---:|---:|---:|"
    )
    ms = [1e3 * each for each in compiled]
    at = micro[int(0.99 * len(micro))]
    print(
        f"| {model._open().config.vocab_size:,} | {statistics.median(ms):.1f} ms | {max(ms):.1f} ms "
        f"| {statistics.median(micro):.0f} us | {at:.0f} us | {micro[-1]:.0f} us |"
    )


if __name__ == "__main__":
    main()
