"""`kv inspect` (also `kv info`): what is in a model's file, and what its cache will cost."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import render
from kvcli.cli.helptext import STORES
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.locate import locate_model
from kvcli.runtime.config import CHUNKED, LATENT, RECURRENT
from kvcli.words import counted, human_bytes, human_count

if TYPE_CHECKING:
    from kvcli.runtime.formats.ggufheader import TensorInfo
    from kvcli.runtime.headers.facts import LayerGroup, ModelFacts, QuantShare, TokenizerFacts


EXAMPLES = """
kv inspect smollm2
kv inspect model.gguf --tensors
kv inspect model.gguf --template
"""


def register(app: typer.Typer) -> None:
    app.command("inspect", rich_help_panel=STORES, epilog=EXAMPLES)(inspect)


def inspect(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A name (kv models ls), a .gguf file, a folder of safetensors or org/repo[:quant].")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Print only the chat template.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show a model's sizes, attention, layers, quantization, tokenizer and template."""
    from kvcli.errors import ModelError, UsageError
    from kvcli.runtime.headers.facts import read_facts
    from kvcli.runtime.headers.openmodel import open_model

    invocation: Invocation = ctx.obj
    if template and (tensors or json):
        raise UsageError("--template prints the template alone", "leave --tensors and --json out")
    with open_model(locate_model(model, invocation)) as file:
        facts = read_facts(file)
        listed = list(file.tensors.values()) if tensors else []
    if template:
        if facts.template is None:
            raise ModelError(f"{model} has no chat template", facts.template_note)
        render.write_out(facts.template.source.strip("\n") + "\n")
    elif json:
        render.print_json("inspect", _as_json(model, facts, listed if tensors else None))
    else:
        render.write_out("".join(f"{label:<11}{text}\n" for label, text in _lines(facts)))
        if tensors:
            rows = [[t.name, " x ".join(map(str, t.shape)), t.type, f"{t.nbytes:,}"] for t in listed]
            render.write_out("\n")
            render.print_table(["tensor", "shape", "type", "bytes"], rows, invocation, right={3})


def _lines(facts: ModelFacts) -> list[tuple[str, str]]:
    """Label and text of each line that people read."""
    size = human_bytes(facts.file_bytes)
    lines = [("file", f"{facts.path} ({size})" if facts.parts == 1 else f"{facts.path} ({facts.parts} parts, {size})")]
    named = [facts.title, facts.arch, f"license {facts.license}" if facts.license else ""]
    if facts.parameters:
        named.append(f"{human_count(facts.parameters)} parameters")
    lines.append(("model", " · ".join(render.one_line(part) for part in named if part)))
    if facts.config is not None:
        lines += _config_lines(facts)
    if facts.problem:
        lines.append(("runs", f"no: {render.one_line(facts.problem)}"))
    if facts.quants:
        mix = [f"{q.type} {q.tensors} ({human_bytes(q.nbytes)})" for q in facts.quants]
        bits = 8 * facts.weight_bytes / facts.parameters
        lines.append(("weights", f"{' · '.join(mix)} · {bits:.2f} bits per weight"))
    lines.append(("tokenizer", _tokenizer_line(facts.tokenizer) if facts.tokenizer else "none"))
    lines.append(("template", _template_line(facts) if facts.tokenizer else "none"))
    if facts.sampling:
        lines.append(("sampling", " · ".join(f"{key} {value}" for key, value in facts.sampling.items())))
    return lines


def _config_lines(facts: ModelFacts) -> list[tuple[str, str]]:
    config = facts.config
    assert config is not None
    sizes = f"{config.n_layers} layers · hidden {config.d_model:,} · ffn {config.d_ff:,}"
    lines = [
        ("context", f"{config.context_length:,} tokens trained on"),
        ("sizes", f"{sizes} · vocabulary {config.vocab_size:,}"),
        ("attention", f"{config.attention_kind}, {config.n_heads} query heads"),
    ]
    lines += [("", _group_text(group)) for group in facts.groups]
    cost = f"{facts.token_bytes:,} bytes a token at f16"
    if facts.late_token_bytes != facts.token_bytes:
        cost += f", {facts.late_token_bytes:,} once the windows are full"
    lines.append(("KV cache", cost))
    if states := sum(group.layers * group.state_bytes for group in facts.groups):
        lines.append(("states", f"{states:,} bytes a sequence, whatever its length"))
    return lines


def _group_text(group: LayerGroup) -> str:
    if group.kind == LATENT:
        return f"{group.layers} latent · {group.dim_v} + {group.dim_k} that RoPE turns, stored once for all heads"
    dims = f"dim {group.dim_k}" if group.dim_k == group.dim_v else f"dim K {group.dim_k}, V {group.dim_v}"
    if group.turned:
        dims += f", values are keys: stored once, beside {group.turned} dims that RoPE turns"
    window = f" ({'chunks of' if group.kind == CHUNKED else 'window'} {group.window:,})" if group.window else ""
    state = f"state of {group.state_bytes:,} bytes in f32" if group.state_bytes else ""
    if group.kind == RECURRENT:
        return f"{group.layers} {group.kind} · {state}" if state else f"{group.layers} feed-forward · nothing kept"
    heads = counted(group.kv_heads, "KV head")
    return f"{group.layers} {group.kind}{window} · {heads} · {dims}{f' · {state}' if state else ''}"


def _tokenizer_line(tokenizer: TokenizerFacts) -> str:
    pre = f" (pre {tokenizer.pre})" if tokenizer.pre else ""
    parts = [f"{tokenizer.model}{pre}", f"{tokenizer.tokens:,} tokens"]
    for role, special in (("bos", tokenizer.bos), ("eos", tokenizer.eos)):
        if special:
            parts.append(f"{role} {special[0]} {special[1]}")
    if tokenizer.adds_bos is not None:
        parts.append("adds bos" if tokenizer.adds_bos else "adds no bos")
    return " · ".join(render.one_line(part) for part in parts)


def _template_line(facts: ModelFacts) -> str:
    where = facts.template_note or "in the file"
    return f"{where} ({len(facts.template.source):,} characters: --template)" if facts.template else where


def _as_json(model: str, facts: ModelFacts, tensors: list[TensorInfo] | None) -> dict[str, Any]:
    config = facts.config
    value: dict[str, Any] = {
        "model": model,
        "path": str(facts.path),
        "parts": facts.parts,
        "file_bytes": facts.file_bytes,
        "model_title": facts.title,
        "kind": None if facts.tokenizer is None else "instruct" if facts.template else "base",
        "arch": facts.arch,
        "license": facts.license or None,
        "parameters": facts.parameters,
        "weight_bytes": facts.weight_bytes,
        "runs": not facts.problem,
        "problem": facts.problem or None,
        "quantization": [_share_object(share) for share in facts.quants],
        "tokenizer": _tokenizer_object(facts.tokenizer) if facts.tokenizer else None,
        "template": {
            "source": facts.template.origin if facts.template else "none",
            "text": facts.template.source if facts.template else None,
        },
        "sampling": dict(facts.sampling),
    }
    if config is not None:
        value |= {
            "context_length": config.context_length,
            "layers": config.n_layers,
            "d_model": config.d_model,
            "d_ff": config.d_ff,
            "vocab_size": config.vocab_size,
            "heads": config.n_heads,
            "attention": {
                "kind": config.attention_kind.lower(),
                "groups": [{**dataclasses.asdict(group), "window": group.window or None} for group in facts.groups],
            },
            "bytes_per_token": facts.token_bytes,
            "windows_full_bytes_per_token": facts.late_token_bytes,
        }
    if tensors is not None:
        value["tensors"] = [_tensor_object(tensor) for tensor in tensors]
    return value


def _share_object(share: QuantShare) -> dict[str, Any]:
    return {
        "type": share.type,
        "tensors": share.tensors,
        "weights": share.weights,
        "size_bytes": share.nbytes,
        "bits_per_weight": share.bits,
    }


def _tokenizer_object(tokenizer: TokenizerFacts) -> dict[str, Any]:
    return {
        "kind": tokenizer.model,
        "pre_tokenizer": tokenizer.pre or None,
        "vocab_size": tokenizer.tokens,
        "bos": tokenizer.bos,
        "eos": tokenizer.eos,
        "adds_bos": tokenizer.adds_bos,
    }


def _tensor_object(tensor: TensorInfo) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": tensor.shape,
        "type": tensor.type,
        "offset": tensor.offset,
        "size_bytes": tensor.nbytes,
        "part": tensor.part,
    }
