"""`kv doctor`: real on this machine, with imitated GPUs, and with everything broken."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import Kv, KvHere
from jsonchecks import check

from kvcli.cli.commands.doctor import probes
from kvcli.runtime.host import diskspeed, machine, measuring
from kvcli.runtime.host.diskspeed import disk_speed
from kvcli.runtime.host.machine import ProbeFailed
from kvcli.runtime.host.memory import CUDA, Memory
from kvcli.runtime.hub import store
from kvcli.runtime.hub.recipes import load_recipes
from kvcli.runtime.plan import overheads
from kvcli.runtime.plan.overheads import Overheads
from kvcli.runtime.promptcache import lookuprecord

MIB, GIB = 1 << 20, 1 << 30
PROGRAM = {"threads": 2, "isa": "avx2", "reason": "", "runtime_bytes": 230 * MIB}
SPEEDS = {"bandwidth_gb_s": 11.04, "copy_gb_s": 9.5}
CARDS = [
    Memory(CUDA, "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, "nvml"),
    Memory(CUDA, "Tesla T4", 15 * GIB, 14 * GIB, "nvml"),
]
FACTS = {"NVIDIA H100 80GB HBM3": ("580.1", (9, 0)), "Tesla T4": ("580.1", (7, 5))}


@pytest.mark.slow
def test_it_measures_this_machine(kv: Kv, kv_env: dict[str, str], tmp_path: Path) -> None:
    """From a folder with a torch.py of its own, which is not the torch that is measured."""
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    done = kv("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert {name for name, values in found.items() if isinstance(values, dict) and "problem" in values} <= {
        "compiler",
        "disk",
    }
    assert found["cpu"]["name"] and found["cpu"]["usable_cpus"] >= found["program"]["threads"] >= 1
    assert found["kernels"]["native"] is (found["program"]["isa"] is not None)
    assert 80 * MIB < found["program"]["runtime_bytes"] < 4 * GIB
    assert 0.1 < found["memory"]["bandwidth_gb_s"] < 2000 and 0.1 < found["memory"]["copy_gb_s"] < 2000
    assert found["packages"]["torch"]
    stored = Path(found["stored"]["path"])
    assert stored == Path(kv_env["XDG_STATE_HOME"]) / "kv/overheads.json"
    assert stored.stat().st_mode & 0o777 == 0o600
    kept = json.loads(stored.read_text())["devices"]["cpu"]
    program, memory = found["program"], found["memory"]
    assert (kept["runtime_bytes"], kept["bandwidth"]) == (program["runtime_bytes"], memory["bandwidth_gb_s"])
    assert kept["torch"] == found["packages"]["torch"]
    left = [path for path in Path(kv_env["XDG_CACHE_HOME"]).rglob("*") if path.is_file()]
    assert left == []


# --- imitated machines ---


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Quick answers instead of measurements; a test changes them. A ProbeFailed as an answer is raised."""
    answers: dict[str, Any] = {"program": PROGRAM, "memory": SPEEDS, "cards": [], "facts": FACTS}
    answers["cuda 0"] = {"runtime_bytes": 512 * MIB, "bandwidth_gb_s": 2900.0, "copy_gb_s": 2800.0}
    answers["device"] = {"reasons": ["", "compute capability 7.5 is below 8.0"]}
    answers["ways 0"] = {
        "multiprocessors": 132, "shared_memory_bytes": 227 << 10, "launches_ahead": True, "past_by_library": False,
    }  # fmt: skip
    answers["cuda 1"] = ProbeFailed("torch 2.13.0 is built without CUDA")

    def measure(*words: str) -> dict[str, Any]:
        answer = answers[" ".join(words)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setattr(probes, "measure", measure)
    monkeypatch.setattr(probes, "disk_speed", lambda folder: disk_speed(folder, 4 * MIB))
    monkeypatch.setattr(machine, "gpus", lambda: answers["cards"])
    monkeypatch.setattr(machine, "_driver_facts", lambda: answers["facts"])
    return answers


def sections(out: str) -> dict[str, str]:
    """The text of each section by its name, its lines joined by blanks."""
    found: dict[str, str] = {}
    for line in out.splitlines():
        name, text = line[:10].strip(), line[10:]
        if name:
            found[name] = text
        else:
            found[list(found)[-1]] += " " + text
    return found


def test_ways_of_stored_rows_are_kept(
    imitated: dict[str, Any], kv_here: KvHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk, and the link to a GPU: what decides whether rows are read or computed."""
    imitated["cards"] = CARDS[:1]
    imitated["cuda 0"] |= {"link_gb_s": 25.0}
    monkeypatch.setattr(probes, "disk_speed", lambda folder: {"folder": "x", "free_bytes": 1, "read_gb_s": 2.5})
    code, out, _ = kv_here("doctor")
    assert code == 0 and "from memory 25.0 GB/s" in out
    assert overheads.load(lookuprecord.DISK)[0].bandwidth == 2.5
    assert overheads.load(lookuprecord.link_to(CARDS[0].name))[0].bandwidth == 25.0


def test_without_a_gpu(imitated: dict[str, Any], kv_here: KvHere) -> None:
    code, out, err = kv_here("doctor")
    assert (code, err) == (0, "")
    found = sections(out)
    names = "kv system CPU kernels compiler packages memory program GPU disk stored models storage settings"
    assert " ".join(found) == names
    assert found["GPU"] == "no NVIDIA GPU found: runs on the CPU"
    assert found["kernels"] == "native · avx2" and found["CPU"].endswith("kv takes 2 threads")
    assert "read 11.0 GB/s" in found["memory"] and found["program"].startswith("230.0 MiB")
    assert overheads.load("cpu") == (Overheads(230 * MIB, 11.04), "")


def test_with_gpus(imitated: dict[str, Any], kv_here: KvHere) -> None:
    imitated["cards"] = CARDS
    found = sections(kv_here("doctor")[1])
    first = "NVIDIA H100 80GB HBM3 · 79.0 GiB free of 80.0 GiB · driver 580.1 compute capability 9.0 · fp8 · "
    assert found["GPU 0"].startswith(first)
    assert "CUDA context and libraries 512.0 MiB" in found["GPU 0"] and "read 2,900.0 GB/s" in found["GPU 0"]
    assert "no fp8" in found["GPU 1"] and "speed not measured: torch 2.13.0 is built without CUDA" in found["GPU 1"]
    assert found["GPU 0"].endswith("long prompts by kernels of kv alone kv can use it")
    assert "132 multiprocessors, 227.0 KiB of shared memory a program" in found["GPU 0"]
    assert "kernels are launched ahead" in found["GPU 0"] and "launched" not in found["GPU 1"]
    assert found["GPU 1"].endswith("kv cannot use it: compute capability 7.5 is below 8.0")
    assert overheads.load("NVIDIA H100 80GB HBM3")[0] == Overheads(512 * MIB, 2900.0)
    assert overheads.load("Tesla T4")[0] == Overheads()
    values = json.loads(kv_here("doctor", "--json")[1])
    check("doctor", values)
    gpus = values["gpus"]
    assert [(gpu["compute_capability"], gpu["fp8"]) for gpu in gpus] == [("9.0", True), ("7.5", False)]
    assert [gpu["unusable"] for gpu in gpus] == [None, "compute capability 7.5 is below 8.0"]


def test_one_gpu_that_no_tool_knows_more_of(imitated: dict[str, Any], kv_here: KvHere) -> None:
    imitated["cards"], imitated["facts"] = CARDS[:1], {}
    found = sections(kv_here("doctor")[1])
    assert "driver not known compute capability not known" in found["GPU"]


def test_estimate_shows_measured_instead_of_assumed(imitated: dict[str, Any], kv_here: KvHere) -> None:
    flags = "--layers 4 --kv-heads 2 --heads 4 --head-dim 64 --hidden 256 --params 1e6 -c 1024 --device cpu"
    shape = flags.split()
    before = kv_here("estimate", *shape)[1]
    assert "assumed: kv doctor measures it" in before
    assert kv_here("doctor")[0] == 0
    after = kv_here("estimate", *shape)[1]
    line = next(line for line in after.splitlines() if line.startswith("runtime and libraries"))
    assert line.split()[-2:] == ["230", "measured"]


def test_what_a_report_needs(imitated: dict[str, Any], kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version and commit, models and folders with sizes, settings in force."""
    monkeypatch.delenv("KV_CONFIG")
    monkeypatch.setenv("KV_THREADS", "2")
    monkeypatch.setenv("KV_THREAD", "3")
    model = store.stored_path(load_recipes()["smollm2"])
    assert model is not None
    model.parent.mkdir(parents=True)
    model.write_bytes(b"x" * MIB)
    config = Path(os.environ["XDG_CONFIG_HOME"]) / "kv/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('cache-type = "int8"\n')
    found = sections(kv_here("doctor")[1])
    assert found["kv"].startswith(f"{probes.__version__} · commit ")
    assert "torch" in found["packages"] and "typer" in found["packages"]
    assert f"models 1.0 MiB: {store.models_dir()}" in found["storage"]
    assert found["settings"] == (
        f"{config} threads = 2 (KV_THREADS) cache-type = int8 (config file)"
        " KV_THREAD is not read: did you mean KV_THREADS?"
    ).replace(") cache", ") · cache")
    values = json.loads(kv_here("doctor", "--json")[1])
    check("doctor", values)
    assert values["settings"]["set"]["threads"] == {"value": "2", "origin": "environment"}
    kept = {each["kind"]: each["size_bytes"] for each in values["storage"]["kinds"]}
    assert (kept["models"], kept["hub"]) == (MIB, 0)
    config.write_text("cache-tpye = 3")
    assert "cache-tpye in" in sections(kv_here("doctor")[1])["settings"]


def test_a_speed_that_changes_is_said(imitated: dict[str, Any], kv_here: KvHere) -> None:
    assert "in place of" not in sections(kv_here("doctor")[1])["stored"]
    imitated["memory"] = SPEEDS | {"bandwidth_gb_s": 43.8}
    assert sections(kv_here("doctor")[1])["stored"].endswith("in place of 11.0 GB/s of cpu")
    stored = json.loads(kv_here("doctor", "--json")[1])["stored"]
    assert stored["before_gb_s"] == {} and stored["best"]["cpu"]["bandwidth_gb_s"] == 43.8


def test_the_best_speed_of_a_machine_is_kept(
    imitated: dict[str, Any], kv_here: KvHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lower one, measured beside other work, would make an upper bound of kv estimate that answers exceed."""
    assert "stays at" not in sections(kv_here("doctor")[1])["stored"]
    when = overheads.load("cpu")[0].measured_at
    assert when
    imitated["memory"] = SPEEDS | {"bandwidth_gb_s": 6.6}
    found = sections(kv_here("doctor")[1])
    assert "read 6.6 GB/s" in found["memory"] and "in place of" not in found["stored"]
    shown = datetime.fromisoformat(when).astimezone().strftime("%Y-%m-%d %H:%M")
    assert found["stored"].endswith(f"cpu stays at 11.0 GB/s of {shown}, its best so far")
    values = json.loads(kv_here("doctor", "--json")[1])
    check("doctor", values)
    assert values["stored"]["best"] == {"cpu": {"bandwidth_gb_s": 11.04, "measured_at": when, "measured_now": False}}
    monkeypatch.setattr(probes.machine, "processor", lambda: {"name": "another", "cpus": 2, "usable_cpus": 2})
    assert sections(kv_here("doctor")[1])["stored"].endswith("in place of 11.0 GB/s of cpu")
    assert overheads.load("cpu")[0].bandwidth == 6.6


def test_lines_stay_within_80_columns(imitated: dict[str, Any], kv_here: KvHere) -> None:
    imitated["cards"] = CARDS
    imitated["program"] = PROGRAM | {"isa": None, "reason": "slow path (plain torch): " + "the compiler said no " * 9}
    lines = kv_here("doctor")[1].splitlines()
    paths = str(overheads.state_file().parent), str(probes.paths.cache_dir())
    assert len(lines) > 15
    assert [line for line in lines if len(line) > 80 and not any(path in line for path in paths)] == []


@pytest.mark.parametrize(
    "reason", ["the CPU kernels were not compiled when kv was installed", "the CPU kernels do not load: x"]
)
def test_kernels_that_are_missing(reason: str, imitated: dict[str, Any], kv_here: KvHere) -> None:
    imitated["program"] = PROGRAM | {"isa": None, "reason": f"slow path (plain torch): {reason}"}
    assert sections(kv_here("doctor")[1])["kernels"] == f"slow path (plain torch): {reason}"
    assert json.loads(kv_here("doctor", "--json")[1])["kernels"]["native"] is False


def test_everything_fails(
    imitated: dict[str, Any], kv_here: KvHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each probe that fails is its line with a reason; the exit code stays 0."""
    imitated["program"] = ProbeFailed("ImportError: no torch")
    imitated["memory"] = ProbeFailed("no answer in 180 s")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file/state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file/cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    code, out, err = kv_here("doctor")
    assert (code, err) == (0, "")
    found = sections(out)
    assert found["program"] == found["kernels"] == "not known: ImportError: no torch"
    assert found["compiler"] == "not known: none found (cc, gcc, clang): only a new installation needs one"
    assert "speed not measured: no answer in 180 s" in found["memory"] and "free of" in found["memory"]
    assert found["disk"].startswith("not known:") and found["stored"].startswith("not known:")
    assert "cannot be written: Not a directory" in found["stored"]
    values = json.loads(kv_here("doctor", "--json")[1])
    check("doctor", values)
    assert values["program"]["problem"] == "ImportError: no torch" and values["memory"]["total_bytes"] > 0


# --- the parts ---


def nvml(fail: bool = False) -> ModuleType:
    module = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def init() -> None:
        if fail:
            raise NVMLError("driver not loaded")

    module.NVMLError, module.nvmlInit, module.nvmlShutdown = NVMLError, init, lambda: None  # type: ignore[attr-defined]
    module.nvmlSystemGetDriverVersion = lambda: b"580.159.03"  # type: ignore[attr-defined]
    module.nvmlDeviceGetCount = lambda: 1  # type: ignore[attr-defined]
    module.nvmlDeviceGetHandleByIndex = lambda i: i  # type: ignore[attr-defined]
    module.nvmlDeviceGetName = lambda handle: "NVIDIA L4"  # type: ignore[attr-defined]
    module.nvmlDeviceGetCudaComputeCapability = lambda handle: (8, 9)  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("script", "facts"),
    [
        (None, {"NVIDIA L4": ("580.159.03", (8, 9))}),
        ('echo "NVIDIA H200, 575.1, 9.0"', {"NVIDIA H200": ("575.1", (9, 0))}),
        ('echo "NVIDIA H200, 575.1, [N/A]"', {"NVIDIA H200": ("575.1", None)}),
        ("exit 2", {}),
        ("echo nonsense", {}),
    ],
)
def test_driver_facts(script: str | None, facts: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From NVML, else from nvidia-smi."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(fail=script is not None))
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machine._driver_facts() == facts


def test_processor_names(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz\nflags : x\n")
    assert machine.processor(tmp_path / "cpuinfo")["name"] == "Some CPU @ 2 GHz"
    assert machine.processor(tmp_path / "none")["name"]


def test_a_measuring_process_that_ends_badly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ProbeFailed, match="KeyError: 'nonsense'"):
        measuring.measure("nonsense")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho hello\necho 'Killed by something' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ProbeFailed, match="exit code 3: Killed by something"):
        measuring.measure("program")
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(measuring, "TIMEOUT_S", 0.2)
    with pytest.raises(ProbeFailed, match="no answer"):
        measuring.measure("program")


def test_disk_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a/b"
    monkeypatch.setattr(diskspeed, "_in_memory", lambda handle, size: False)
    found = disk_speed(folder, 9 * MIB)
    assert found["read_gb_s"] > 0 and found["free_bytes"] > 0
    assert list(folder.iterdir()) == []


def test_a_file_that_stays_in_memory_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    with pytest.raises(ProbeFailed, match="page cache"):
        disk_speed(tmp_path, 2 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diskspeed, "KEEP_FREE_BYTES", 1 << 60)
    with pytest.raises(ProbeFailed, match="MiB are free"):
        disk_speed(tmp_path)
    assert list(tmp_path.iterdir()) == []
