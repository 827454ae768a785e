"""Whether every kernel fits every card: compiled by Triton for cards that need not be here.

    python benchmarks/targets.py                        # all models, cache types and cards (hours)
    python benchmarks/targets.py --sample               # what the tests run: each kernel for a card or two
    python benchmarks/targets.py --cases 8b --types int4,int8 --targets 86,120

The launches are those of the product: an engine without numbers (hollow.py) says what it would launch on the card. Each
kernel is then compiled by the card's own compiler, and fits if a program's shared memory, tensor memory and registers
are there, no more than SPILLED bytes of a thread's registers are kept in memory, and fences stand where they have to
(`unfenced`). A line for each that does not fit,
a table of the largest, then one JSON line; the exit code is 1 if anything does not fit. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kvcli import environment

environment.prepare()  # before torch is imported

import triton  # noqa: E402
from hollow import Model, launched, launched_by_states  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime._async_compile import AsyncCompileMode  # noqa: E402

from kvcli.blockformats import WEIGHT_FORMATS  # noqa: E402
from kvcli.codecs import CODECS  # noqa: E402
from kvcli.kernels.gpu.chip import Chip  # noqa: E402
from kvcli.kernels.gpu.launching import Variant  # noqa: E402
from kvcli.options import AttendOptions, CacheOptions, EvictOptions  # noqa: E402

KIB = 1 << 10
CHIPS = {  # a card of each: A100, RTX 3060, RTX 4090, H100, B200, RTX 5090
    chip.sm: chip
    for chip in (
        Chip((8, 0), 108, 163 * KIB), Chip((8, 6), 28, 99 * KIB), Chip((8, 9), 128, 99 * KIB),
        Chip((9, 0), 132, 227 * KIB), Chip((10, 0), 148, 227 * KIB), Chip((12, 0), 170, 99 * KIB),
    )
}  # fmt: skip
REGISTERS, TENSOR_COLUMNS = 1 << 16, 512  # of a multiprocessor; of its tensor memory, where it has such
SPILLED = 256  # bytes of a thread
CONTEXT = 1 << 17  # tokens: long enough for every kernel that longer ones need
PAIRS = [*((name, name) for name in CODECS), ("int8", "int4"), ("f16", "int8")]
SOME = [(name, name) for name in ("f16", "int8", "int4")]
CASES = {  # name: model, cache types
    "8b": (Model("llama-3.1-8b"), PAIRS),
    "1b": (Model("llama-3.2-1b"), PAIRS),
    "30b-a3b": (Model("qwen3-30b-a3b"), SOME),
    "30b-a3b F16": (Model("qwen3-30b-a3b", "F16"), SOME[:1]),
    "gpt-oss": (Model("gpt-oss-20b", "MXFP4", (".bias",)), SOME),
    "gemma2": (Model("gemma-2-2b", softcap=50.0), PAIRS),
    "gemma3": (Model("gemma-3-4b", "Q8_0"), SOME),
    "gemma4": (Model("gemma-3-12b", head_dim=512), PAIRS),
    "qwen2": (Model("qwen2.5-0.5b", "Q8_0", (".bias",)), SOME),
    "olmo3": (Model("olmo-3-7b"), SOME),
    "phi3": (Model("phi-3-mini"), SOME),
    "phi3 80": (Model("phi-3-mini", head_dim=80), SOME),
    "smollm2": (Model("smollm2", "Q4_1"), SOME),
    "deepseek2": (Model("deepseek-v2-lite", "Q8_0"), SOME[:2]),
    "head 512": (Model("gemma-3-4b", "Q8_0", head_dim=512), PAIRS),
    **{f"8b {name}": (Model("llama-3.1-8b", name), [("f16", "f16")]) for name in WEIGHT_FORMATS},
}
SAMPLE = (  # cards, with a case and a cache type
    (80, "olmo3", "int4"), (86, "30b-a3b F16", "f16"), (89, "phi3 80", "int8"), (90, "8b", "fp8"),
    (100, "gpt-oss", "int8"), (120, "qwen2", "int4"), (89, "deepseek2", "f16"),
)  # fmt: skip
SETTINGS: list[dict[str, Any]] = [  # of 8b
    {},
    {"evict": EvictOptions(policy="sink")},
    {"evict": EvictOptions(policy="snapkv", budget="25%")},
    {"attend": AttendOptions(pages=4, share=0.25, sparse_from=1)},
]
OFTEN = {"_attend": (90, 100)}  # for more than one card: their products differ


class Key(NamedTuple):
    """What decides how much of a card a kernel takes: its constants and options, not where tensors begin."""

    kernel: str
    constants: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, variant: Variant) -> Key:
        given = zip(variant.kernel.params, variant.arguments, strict=False)
        constants = [(param.name, str(value)) for param, value in given if param.is_constexpr]
        return cls(variant.kernel.__name__, tuple(constants), variant.options)

    @property
    def short(self) -> str:
        named = [f"{name}={value}" for name, value in (*self.constants, *self.options) if value not in ("False", "0")]
        return f"{self.kernel} {' '.join(named)}"


class Fit(NamedTuple):
    """What a program takes: bytes of shared memory, columns of tensor memory, registers, and bytes of registers in
    memory, of each of `threads`. `unfenced`: products that may be wrong, see there."""

    shared: int
    columns: int
    registers: int
    spilled: int
    threads: int
    unfenced: int

    def lacks(self, chip: Chip) -> str:
        """What the card has too little of; "" = the kernel fits."""
        if self.shared > chip.shared_bytes:
            return f"{self.shared:,} bytes of shared memory, there are {chip.shared_bytes:,}"
        if self.columns > TENSOR_COLUMNS:
            return f"{self.columns} columns of tensor memory"
        if self.registers * self.threads > REGISTERS:
            return f"{self.registers} registers of {self.threads} threads"
        if self.unfenced:
            return f"{self.unfenced} products read copies without a fence"
        return f"{self.spilled:,} bytes a thread are spilled" if self.spilled > SPILLED else ""


class Elsewhere:
    """In place of Triton's driver: the card is another one, and nothing can be launched."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": CHIPS[device].shared_bytes}

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_device(self) -> int:
        return self.sm  # what is compiled is kept apart by this

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)


def compile_for(sm: int, variants: dict[Key, Variant], threads: int) -> Iterator[tuple[Key, Fit | str]]:
    """What each takes on the card, or what the compiler says."""
    driver.set_active(Elsewhere(sm))
    with ThreadPoolExecutor(threads) as executor:
        with AsyncCompileMode(executor, ignore_errors=True):
            kernels = {
                key: each.kernel.warmup(*each.arguments, grid=(1,), **dict(each.options))
                for key, each in variants.items()
            }
        for key, kernel in kernels.items():
            try:
                found = kernel.result() if hasattr(kernel, "result") else kernel
            except Exception as error:  # whatever it is, the kernel is one that the card would not run
                yield key, f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            columns = getattr(found.metadata, "tmem_size", None) or 0
            usage, threads = _usage(found.asm["cubin"]), 32 * found.metadata.num_warps
            yield key, Fit(found.metadata.shared, columns, *usage, threads, unfenced(found.asm["ptx"]))


def unfenced(assembly: str) -> int:
    """Products by warp groups or tensor memory that come behind a wait for copies into shared memory, and behind no
    fence since: they may read what was there before. See `fence_copies` in kernels/gpu/language.py."""
    found, fenced = 0, True
    for line in assembly.splitlines():
        if "cp.async.wait_group" in line:
            fenced = False
        elif "fence.proxy.async" in line:
            fenced = True
        elif "wgmma.mma_async" in line or "tcgen05.mma" in line:
            found += not fenced
    return found


def _usage(binary: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack, of each thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def wanted(names: Iterable[str], types: Iterable[str], sm: int) -> dict[Key, Variant]:
    """What the cases launch on that card, each once."""
    found: dict[Key, Variant] = {}
    for name in names:
        model, pairs = CASES[name]
        for pair in pairs:
            if not types or "/".join(pair) in types or pair[0] == pair[1] in types:
                for setting in SETTINGS if name == "8b" else SETTINGS[:1]:
                    cache = CacheOptions(ctx_size=CONTEXT, type_k=pair[0], type_v=pair[1], **setting)
                    found |= {Key.of(variant): variant for variant in launched(model, cache, CHIPS[sm])}
    if "8b" in names:
        found |= {Key.of(variant): variant for variant in launched_by_states(CHIPS[sm])}
    return found


def sample() -> dict[int, dict[Key, Variant]]:
    """For each card some kernels of one model, in one form each: for all cards together every kernel."""
    launches: dict[int, dict[Key, Variant]] = {}
    for sm, name, types in SAMPLE:
        launches.setdefault(sm, {}).update(wanted([name], [types], sm))
    found: dict[int, dict[Key, Variant]] = {sm: {} for sm in launches}
    for name in sorted({key.kernel for variants in launches.values() for key in variants}):
        there = [sm for sm, variants in launches.items() if any(key.kernel == name for key in variants)]
        for sm in OFTEN.get(name, [min(there, key=lambda sm: len(found[sm]))]):
            key = max(key for key in launches[sm] if key.kernel == name)
            found[sm][key] = launches[sm][key]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--types", default="", help="cache types, e.g. int4,int8/int4; all those of the cases")
    parser.add_argument("--targets", default=",".join(map(str, CHIPS)))
    parser.add_argument("--kernels", default="", help="some of them, e.g. _attend,_few")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rows, failures = [], 0
    types, some = options.types.split(",") if options.types else [], sample() if options.sample else {}
    for sm in map(int, options.targets.split(",")):
        variants = some[sm] if options.sample else wanted(options.cases.split(","), types, sm)
        if options.kernels:
            variants = {key: each for key, each in variants.items() if key.kernel in options.kernels.split(",")}
        for key, fit in compile_for(sm, variants, options.threads):
            problem = fit if isinstance(fit, str) else fit.lacks(CHIPS[sm])
            if problem:
                failures += 1
                print(f"sm_{sm} {problem}: {key.short}", flush=True)
            rows.append({"sm": sm, "kernel": key.short, "problem": problem, **_numbers(fit)})
    _table(rows)
    print(json.dumps({"triton": triton.__version__, "launches": rows}))
    sys.exit(failures > 0)


def _numbers(fit: Fit | str) -> dict[str, int]:
    return {} if isinstance(fit, str) else fit._asdict()


def _table(rows: list[dict[str, Any]]) -> None:
    """For each card and kernel how many forms there are, and the most that one takes."""
    each: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        each.setdefault((row["sm"], row["kernel"].partition(" ")[0]), []).append(row)
    print(f"{'card':7} {'kernel':20} {'forms':>5} {'fail':>4} {'shared':>7} {'registers':>9} {'spilled':>7}")
    for (sm, name), group in each.items():
        most = [max((row.get(x, 0) for row in group), default=0) for x in ("shared", "registers", "spilled")]
        failed = sum(bool(row["problem"]) for row in group)
        print(f"sm_{sm:<4} {name:20} {len(group):5} {failed:4} {most[0]:7,} {most[1]:9} {most[2]:7}")


if __name__ == "__main__":
    main()
