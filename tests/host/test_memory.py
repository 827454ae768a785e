"""How much memory there is: control groups, GPUs by NVML and nvidia-smi, sizes as people write them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvcli.errors import UsageError
from kvcli.runtime.host import memory
from kvcli.runtime.host.memory import main_memory, parse_size, process_bytes
from kvcli.runtime.plan import overheads
from kvcli.runtime.plan.cards import CARDS, card_of, find_card
from kvcli.runtime.plan.overheads import Overheads

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [("6G", 6 * GIB), ("6GiB", 6 * GIB), ("512MiB", 512 * MIB), ("1.5g", 1536 * MIB), ("8 GB", 8 * 10**9),
     ("8gib", 8 * GIB), ("1.5MB", 1_500_000), (str(6 * GIB), 6 * GIB), ("0.9", 9 * GIB),
     (".5", 5 * GIB), ("1.0", 10 * GIB), ("0", 0)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--vram", 10 * GIB) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "6X", "1e9", "six", "1.2.3G", "6", "0.9 G B", "9" * 30])
def test_sizes_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--vram"):
        parse_size(text, "--vram", 10 * GIB)


def test_a_share_needs_a_whole() -> None:
    with pytest.raises(UsageError, match="unknown size"):
        parse_size("0.9", "--vram")


# --- main memory ---


def machine(root: Path, cgroup: str, total: int = 64 * GIB, available: int = 48 * GIB) -> None:
    write(
        root / "proc/meminfo",
        f"MemTotal: {total >> 10} kB\nMemFree: 5 kB\nMemAvailable: {available >> 10} kB\n",
    )
    write(root / "proc/self/cgroup", cgroup)


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


def group_v2(folder: Path, limit: object, usage: int, inactive: int) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", usage)
    write(folder / "memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 7\n")


def group_v1(folder: Path, limit: int, usage: int, inactive: int) -> None:
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", usage)
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")


def test_without_groups(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    found = main_memory(tmp_path)
    assert (found.total, found.free, found.source) == (64 * GIB, 48 * GIB, "MemAvailable")


def test_the_narrowest_group_counts(tmp_path: Path) -> None:
    machine(tmp_path, "0::/user/app\n")
    base = tmp_path / "sys/fs/cgroup"
    group_v2(base / "user", 8 * GIB, 3 * GIB, GIB)
    group_v2(base / "user/app", "max", 2 * GIB, 0)
    found = main_memory(tmp_path)
    assert (found.total, found.free, found.source) == (8 * GIB, 6 * GIB, "cgroup")
    group_v2(base / "user/app", 4 * GIB, 3 * GIB, GIB)
    assert main_memory(tmp_path).free == 2 * GIB


def test_inside_a_container_the_path_is_the_hosts(tmp_path: Path) -> None:
    machine(tmp_path, "0::/docker/abc\n")
    group_v2(tmp_path / "sys/fs/cgroup", 2 * GIB, GIB, 0)
    assert main_memory(tmp_path).free == GIB


def test_groups_of_version_1(tmp_path: Path) -> None:
    machine(tmp_path, "9:cpu:/x\n4:memory:/x/y\n0::/\n")
    base = tmp_path / "sys/fs/cgroup/memory"
    group_v1(base / "x/y", 9223372036854771712, GIB, 0)
    assert main_memory(tmp_path).source == "MemAvailable"
    group_v1(base / "x", 3 * GIB, 2 * GIB, GIB)
    assert (main_memory(tmp_path).free, main_memory(tmp_path).total) == (2 * GIB, 3 * GIB)


def test_usage_over_the_limit_leaves_nothing(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    group_v2(tmp_path / "sys/fs/cgroup", GIB, 2 * GIB, 0)
    assert main_memory(tmp_path).free == 0


def test_this_machine() -> None:
    found = main_memory()
    assert 0 < found.free <= found.total
    assert process_bytes() > 5 * MIB


# --- GPUs ---


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.Path, "exists", lambda self: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def nvml(fail: bool = False) -> ModuleType:
    """A pynvml with two cards."""
    module = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def init() -> None:
        if fail:
            raise NVMLError("driver not loaded")

    cards = [
        ("GPU-aa", "NVIDIA GeForce RTX 4090", 24 * GIB, 20 * GIB),
        ("GPU-bb", b"NVIDIA L4", 23 * GIB, 22 * GIB),
    ]
    module.NVMLError, module.nvmlInit, module.nvmlShutdown = NVMLError, init, lambda: None  # type: ignore[attr-defined]
    module.nvmlDeviceGetCount = lambda: len(cards)  # type: ignore[attr-defined]
    module.nvmlDeviceGetHandleByIndex = lambda i: cards[i]  # type: ignore[attr-defined]
    module.nvmlDeviceGetMemoryInfo = lambda h: SimpleNamespace(total=h[2], free=h[3])  # type: ignore[attr-defined]
    module.nvmlDeviceGetName = lambda h: h[1]  # type: ignore[attr-defined]
    module.nvmlDeviceGetUUID = lambda h: h[0]  # type: ignore[attr-defined]
    return module


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["4090", "L4"]),
        ("1", ["L4"]),
        ("1,0", ["L4", "4090"]),
        ("", []),
        ("-1", []),
        ("GPU-b", ["L4"]),
        ("0,9,1", ["4090"]),
    ],
)
def test_nvml(visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = memory.gpus()
    assert [card.name.split()[-1] for card in found] == names
    assert all(card.source == "nvml" and card.kind == "cuda" for card in found)


@pytest.mark.usefixtures("devices")
def test_nvidia_smi_where_nvml_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(fail=True))
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "GPU-cc, NVIDIA H100 PCIe, 81559, 81000"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (found,) = memory.gpus()
    assert (found.name, found.total, found.free, found.source) == (
        "NVIDIA H100 PCIe",
        81559 * MIB,
        81000 * MIB,
        "nvidia-smi",
    )
    program.write_text("#!/bin/sh\nexit 9\n")
    assert memory.gpus() == []


def test_no_device_files_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.Path, "exists", lambda self: False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert memory.gpus() == []


# --- cards ---


def test_cards_by_name() -> None:
    assert find_card("RTX 3060").name == "rtx3060-12g"
    assert find_card("rtx4090-24g").bandwidth == 1008
    assert find_card("h100").usable_mib < CARDS["h100-80g"].total_mib
    for name in ("a100", "rtx9999"):
        with pytest.raises(UsageError):
            find_card(name)


@pytest.mark.parametrize(
    ("title", "mib", "rate"),
    [
        ("NVIDIA GeForce RTX 4090", 24564, 1008),
        ("NVIDIA A100-SXM4-80GB", 81920, 2039),
        ("NVIDIA A100-SXM4-40GB", 40960, 1555),
        ("NVIDIA H100 80GB HBM3", 81559, 3350),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, 288),
        ("Tesla T4", 15360, 320),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 6144, None),
        ("NVIDIA GeForce RTX 3070 Ti", 8192, None),
        ("NVIDIA L40", 46068, None),
    ],
)
def test_bandwidth_by_the_drivers_name(title: str, mib: int, rate: float | None) -> None:
    found = card_of(title, mib * MIB)
    assert (found.bandwidth if found else None) == rate


# --- measured overheads ---


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "kv/overheads.json"


def test_overheads_are_kept_by_device(state: Path) -> None:
    assert overheads.load("cpu") == (Overheads(), "")
    overheads.store("cpu", Overheads(runtime_bytes=123))
    overheads.store("cpu", Overheads(bandwidth=20.5))
    overheads.store("NVIDIA L4", Overheads(456, 290.0))
    assert overheads.load("cpu") == (Overheads(123, 20.5), "")
    assert overheads.load("NVIDIA L4") == (Overheads(456, 290.0), "")
    assert state.stat().st_mode & 0o777 == 0o600
    assert list(state.parent.iterdir()) == [state]


def test_the_best_bandwidth_of_a_machine_is_kept(state: Path) -> None:
    """With its moment, which may be damaged; that of another machine is replaced."""
    overheads.store("cpu", Overheads(1, 20.5), "one")
    first = overheads.load("cpu")[0].measured_at
    write(state, state.read_text().replace(str(first), "2026-01-02T03:04:05+00:00"))
    overheads.store("cpu", Overheads(2, 6.5), "one")
    assert overheads.load("cpu") == (Overheads(2, 20.5), "")
    assert overheads.load("cpu")[0].measured_at == "2026-01-02T03:04:05+00:00"
    overheads.store("cpu", Overheads(2, 21.0), "one")
    assert overheads.load("cpu")[0].bandwidth == 21.0
    assert overheads.load("cpu")[0].measured_at != "2026-01-02T03:04:05+00:00"
    overheads.store("cpu", Overheads(2, 6.5), "another")
    assert overheads.load("cpu")[0].bandwidth == 6.5
    write(state, '{"kv_schema": 1, "devices": {"cpu": {"bandwidth": 3, "measured_at": "then"}}}')
    assert overheads.load("cpu") == (Overheads(None, 3), "") and overheads.load("cpu")[0].measured_at is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "\xff", '{"kv_schema": 9}', '{"kv_schema": 1, "devices": {"cpu": 5}}'),
        '{"kv_schema": 1, "devices": {"cpu": {"bandwidth": -1}}}',
    ],
)
def test_a_damaged_file_is_told_and_replaced(state: Path, text: str) -> None:
    write(state, text)
    found, warning = overheads.load("cpu")
    assert found == Overheads() and "kv doctor" in warning
    overheads.store("cpu", Overheads(runtime_bytes=5, bandwidth=1.0))
    assert overheads.load("cpu") == (Overheads(5, 1.0), "")


def test_another_torch_takes_another_amount(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ["2.13.0+cpu"]
    monkeypatch.setattr(overheads, "_torch", lambda: installed[0])
    overheads.store("cpu", Overheads(123, 20.5))
    assert overheads.load("cpu") == (Overheads(123, 20.5), "")
    installed[0] = "2.14.1"
    assert overheads.load("cpu") == (Overheads(None, 20.5), "")
    overheads.store("cpu", Overheads(bandwidth=30.0))
    assert overheads.load("cpu") == (Overheads(None, 30.0), "")
    overheads.store("cpu", Overheads(runtime_bytes=456))
    assert overheads.load("cpu") == (Overheads(456, 30.0), "")


@pytest.fixture
def fresh_build() -> Iterator[None]:
    """Which build of torch is installed is looked for anew, and what the test finds is forgotten."""
    overheads._built_for_gpus.cache_clear()
    yield
    overheads._built_for_gpus.cache_clear()


@pytest.mark.usefixtures("fresh_build")
@pytest.mark.parametrize(
    ("files", "mib"),
    [((), 182), (("libtorch_cpu.so",), 182), (("libtorch_cuda.so",), 490), (("libtorch_hip.so",), 490)],
)
def test_what_is_assumed_depends_on_the_build_of_torch(
    files: tuple[str, ...], mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('torch was imported')")
    for name in files:
        (folder / "lib" / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert overheads.assumed_bytes("cpu") == mib * MIB
    assert overheads.assumed_bytes("cuda") == 450 * MIB


@pytest.mark.usefixtures("fresh_build")
def test_without_torch_the_smaller_build_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads.importlib.util, "find_spec", lambda name: None)
    assert overheads.assumed_bytes("cpu") == 182 * MIB
