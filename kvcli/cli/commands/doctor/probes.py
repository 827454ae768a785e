"""What `kv doctor` finds out, probe by probe. A probe that fails is a finding with its reason, never an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import kvcli
from kvcli import __version__, paths, versions
from kvcli.cli import storage
from kvcli.errors import KVError
from kvcli.runtime.host import machine
from kvcli.runtime.host.diskspeed import disk_speed
from kvcli.runtime.host.machine import ProbeFailed
from kvcli.runtime.host.measuring import measure
from kvcli.runtime.host.memory import CPU, main_memory
from kvcli.runtime.hub import inventory
from kvcli.runtime.plan import overheads
from kvcli.runtime.plan.overheads import Overheads
from kvcli.runtime.promptcache import lookuprecord
from kvcli.words import human_bytes


@dataclass(frozen=True)
class Finding:
    """One section: `facts` in words for people, `values` for programs. Failed: one fact, {"problem": reason}."""

    name: str
    facts: tuple[str, ...]
    values: dict[str, Any]


def examine(settings: Finding, prompts: Path, begin: Callable[[str], None]) -> Iterator[Finding]:
    """All findings in the order they are shown; measurements are stored for `kv estimate` at the end.

    `settings`: what is known of them; `prompts`: the folder of prompt caches; `begin` is told what is measured next,
    where that takes a while. Takes some seconds. Raises nothing that concerns the machine.
    """
    begin("Python, torch and the kernels")
    yield _probe("kv", _version, _built)
    yield _probe("system", machine.system, _system)
    program = _probe("program", lambda: measure("program"), lambda v: ())
    processor = _probe("CPU", machine.processor, lambda v: _processor(v, program.values))
    yield processor
    yield _kernels(program)
    yield _probe("compiler", machine.compiler, lambda v: (v["version"], v["path"]))
    yield _probe("packages", versions.libraries, _packages)
    begin("speed of memory")
    memory = _probe("memory", _memory, _speeds_of_memory)
    yield memory
    if "problem" not in program.values:
        size = f"{human_bytes(program.values['runtime_bytes'])} for Python, torch and libraries, beside any model"
        program = Finding("program", (size,), program.values)
    yield program
    measured = [(CPU, program.values.get("runtime_bytes"), memory.values.get("bandwidth_gb_s"))]
    ways: dict[str, float | None] = {}  # on which rows of prompts come to the device, in GB/s
    begin("GPUs")
    for finding in _graphics():
        yield finding
        if finding.values.get("name"):
            values = finding.values
            measured.append((values["name"], values.get("runtime_bytes"), values.get("bandwidth_gb_s")))
            ways[lookuprecord.link_to(values["name"])] = values.get("link_gb_s")
    begin("speed of the disk")
    disk = _probe("disk", lambda: disk_speed(paths.cache_dir()), _disk)
    yield disk
    ways[lookuprecord.DISK] = disk.values.get("read_gb_s")
    yield _probe("stored", lambda: _store(measured, ways, processor.values.get("name", "")), _stored)
    yield _probe("models", _models, _names)
    yield _probe("storage", lambda: _kept(prompts), _sizes)
    yield settings


def _version() -> dict[str, Any]:
    return {"version": __version__, "commit": versions.commit(), "path": str(Path(kvcli.__file__).parent)}


def _built(values: dict[str, Any]) -> tuple[str, ...]:
    return values["version"], f"commit {values['commit'] or 'not known'}", values["path"]


def _models() -> dict[str, Any]:
    """Those that are here."""
    here = [entry for entry in inventory.here() if entry.path]
    return {
        "here": [{"model": entry.name, "file_bytes": entry.size or None, "path": str(entry.path)} for entry in here]
    }


def _names(values: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{each['model']} {human_bytes(each['file_bytes'] or 0)}" for each in values["here"]) or (
        "none is downloaded",
    )


def _kept(prompts: Path) -> dict[str, Any]:
    return {"kinds": [kind.as_object() for kind in storage.kinds(prompts)]}


def _sizes(values: dict[str, Any]) -> tuple[str, ...]:
    there = [each for each in values["kinds"] if each["files"]]
    return tuple(f"{each['kind']} {human_bytes(each['size_bytes'])}: {each['path']}" for each in there) or ("nothing",)


def _probe(name: str, ask: Callable[[], dict[str, Any]], say: Callable[[dict[str, Any]], tuple[str, ...]]) -> Finding:
    """What `ask` finds, said by `say`; or why it fails."""
    try:
        values = ask()
    except (ProbeFailed, KVError, OSError) as error:
        return Finding(name, (f"not known: {error}",), {"problem": str(error)})
    return Finding(name, say(values), values)


def _system(values: dict[str, Any]) -> tuple[str, ...]:
    return values["os"], values["machine"], f"Python {values['python']}"


def _processor(values: dict[str, Any], program: dict[str, Any]) -> tuple[str, ...]:
    usable = f"{values['usable_cpus']} of {values['cpus']} CPUs usable"
    threads = program.get("threads")
    return (values["name"], usable, *([f"kv takes {threads} thread{'s' * (threads > 1)}"] if threads else []))


def _kernels(program: Finding) -> Finding:
    """The compiled kernels' instruction set, or why there are none."""
    values = program.values
    if "problem" in values:
        return Finding("kernels", program.facts, values)
    if values["isa"] is None:
        return Finding("kernels", (values["reason"],), {"native": False, "reason": values["reason"]})
    return Finding("kernels", ("native", values["isa"]), {"native": True, "isa": values["isa"]})


def _packages(values: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name} {version or 'is not installed'}" for name, version in values.items())


def _memory() -> dict[str, Any]:
    memory = main_memory()
    values: dict[str, Any] = {"total_bytes": memory.total, "free_bytes": memory.free, "source": memory.source}
    return values | _measured("memory")


def _measured(what: str, *arguments: str) -> dict[str, Any]:
    """A measurement as part of a finding: the rest stands where it fails."""
    try:
        return measure(what, *arguments)
    except ProbeFailed as error:
        return {"not_measured": str(error)}


def _speeds_of_memory(values: dict[str, Any]) -> tuple[str, ...]:
    free = f"{human_bytes(values['free_bytes'])} free of {human_bytes(values['total_bytes'])} ({values['source']})"
    return free, *_speeds(values)


def _speeds(values: dict[str, Any]) -> tuple[str, ...]:
    if "not_measured" in values:
        return (f"speed not measured: {values['not_measured']}",)
    link = [f"from memory {values['link_gb_s']:,.1f} GB/s"] if "link_gb_s" in values else []
    return f"read {values['bandwidth_gb_s']:,.1f} GB/s", f"copy {values['copy_gb_s']:,.1f} GB/s", *link


def _graphics() -> Iterator[Finding]:
    """A finding for each GPU, or the one that says that there is none."""
    cards = machine.graphics()
    if not cards:
        yield Finding("GPU", ("no NVIDIA GPU found: runs on the CPU",), {})
    reasons = _reasons(len(cards))
    for card in cards:
        reason, index = reasons[card["index"]], str(card["index"])
        values = card | _measured("cuda", index) | {"unusable": reason or None} | ({} if reason else _ways(index))
        yield Finding("GPU" if len(cards) == 1 else f"GPU {card['index']}", _card(values), values)


def _reasons(count: int) -> list[str]:
    """Why `kv` cannot use each GPU; "" = it can."""
    try:
        return measure("device")["reasons"]
    except ProbeFailed as error:
        return [str(error)] * count


def _ways(index: str) -> dict[str, Any]:
    """How kernels are launched on a GPU; {} = not found out."""
    try:
        return measure("ways", index)
    except ProbeFailed:
        return {}


def _launches(values: dict[str, Any]) -> Iterator[str]:
    """The same in words."""
    if "multiprocessors" in values:
        shared = human_bytes(values["shared_memory_bytes"])
        yield f"{values['multiprocessors']} multiprocessors, {shared} of shared memory a program"
        yield "kernels are launched ahead" if values["launches_ahead"] else "kernels are launched one after the other"
        yield f"long prompts by {'the library of CUDA' if values['past_by_library'] else 'kernels of kv alone'}"


def _card(values: dict[str, Any]) -> tuple[str, ...]:
    facts = [values["name"], f"{human_bytes(values['free_bytes'])} free of {human_bytes(values['total_bytes'])}"]
    facts.append(f"driver {values['driver'] or 'not known'}")
    if values["compute_capability"] is None:
        facts.append("compute capability not known")
    else:
        facts += [f"compute capability {values['compute_capability']}", "fp8" if values["fp8"] else "no fp8"]
    if values.get("runtime_bytes"):
        facts.append(f"CUDA context and libraries {human_bytes(values['runtime_bytes'])}")
    verdict = f"kv cannot use it: {values['unusable']}" if values["unusable"] else "kv can use it"
    return (*facts, *_speeds(values), *_launches(values), verdict)


def _disk(values: dict[str, Any]) -> tuple[str, ...]:
    free = f"{human_bytes(values['free_bytes'])} free in {values['folder']}"
    return f"read {values['read_gb_s']:,.1f} GB/s", free


def _store(
    measured: list[tuple[str, int | None, float | None]], ways: dict[str, float | None], processor: str
) -> dict[str, Any]:
    """Keep what `kv estimate` reads, for each device its runtime bytes and the best read speed so far, and what decides
    whether stored rows are read (`ways`). `before_gb_s`: speeds that this changes by more than a tenth; `best`: what is
    kept, and when it was measured."""
    path, before, best = overheads.state_file(), {}, {}
    for device, runtime_bytes, speed in measured:
        old = overheads.load(device)[0].bandwidth
        path = _keep(device, Overheads(runtime_bytes, speed), processor if device == CPU else "")
        kept = overheads.load(device)[0]
        if old and kept.bandwidth and abs(old - kept.bandwidth) > old / 10:
            before[device] = old
        if kept.bandwidth:
            best[device] = {
                "bandwidth_gb_s": kept.bandwidth,
                "measured_at": kept.measured_at,
                "measured_now": kept.bandwidth == speed,
            }
    for way, speed in ways.items():
        _keep(way, Overheads(None, speed), "")
    return {"path": str(path), "before_gb_s": before, "best": best}


def _keep(device: str, measured: Overheads, machine: str) -> Path:
    """Raises ProbeFailed."""
    try:
        return overheads.store(device, measured, machine)
    except OSError as error:
        path = overheads.state_file()
        raise ProbeFailed(f"{path} cannot be written: {error.strerror or error}") from None


def _stored(values: dict[str, Any]) -> tuple[str, ...]:
    before = [f"in place of {speed:,.1f} GB/s of {device}" for device, speed in values["before_gb_s"].items()]
    kept = [
        f"{device} stays at {best['bandwidth_gb_s']:,.1f} GB/s{_moment(best['measured_at'])}, its best so far"
        for device, best in values["best"].items()
        if not best["measured_now"]
    ]
    return values["path"], "kv estimate and prompt caches use it", *before, *kept


def _moment(when: str | None) -> str:
    """' of 2026-11-29 10:20', local time; "" where it is not known."""
    return f" of {datetime.fromisoformat(when).astimezone():%Y-%m-%d %H:%M}" if when else ""


def as_json(found: Iterable[Finding]) -> dict[str, Any]:
    """The findings by name, those of GPUs as one list."""
    found = list(found)
    gpus = [finding.values for finding in found if finding.name.startswith("GPU") and finding.values]
    others = {finding.name.lower(): finding.values for finding in found if not finding.name.startswith("GPU")}
    return {**others, "gpus": gpus}
