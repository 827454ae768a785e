"""Graphics cards that one can plan for without having them: `kv estimate --gpu NAME`.

Total memory is what nvidia-smi shows, bandwidth and multiprocessors are the published figures. What a fresh card leaves
to programs is not published: RESERVED_MIB stands for the driver's part and is an assumption.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcli.errors import UsageError
from kvcli.runtime.host.memory import CUDA, Memory
from kvcli.words import meant, near

RESERVED_MIB = 412
_VARIANTS = {"ti", "super", "laptop", "pcie"}  # another card, with another bandwidth


@dataclass(frozen=True)
class Card:
    """`total_mib` of memory, read at up to `bandwidth` GB/s (10^9 bytes) by `multiprocessors` of a compute
    `capability`."""

    name: str
    title: str
    total_mib: int
    bandwidth: float
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def usable_mib(self) -> int:
        return self.total_mib - RESERVED_MIB

    def memory(self) -> Memory:
        return Memory(CUDA, self.title, self.total_mib << 20, self.usable_mib << 20, "table")


CARDS = {
    card.name: card
    for card in (
        Card("gtx1080ti-11g", "NVIDIA GTX 1080 Ti 11 GB", 11264, 484, (6, 1), 28),
        Card("rtx2080ti-11g", "NVIDIA RTX 2080 Ti 11 GB", 11264, 616, (7, 5), 68),
        Card("rtx3060-12g", "NVIDIA RTX 3060 12 GB", 12288, 360, (8, 6), 28),
        Card("rtx3070-8g", "NVIDIA RTX 3070 8 GB", 8192, 448, (8, 6), 46),
        Card("rtx3080-10g", "NVIDIA RTX 3080 10 GB", 10240, 760, (8, 6), 68),
        Card("rtx3090-24g", "NVIDIA RTX 3090 24 GB", 24576, 936, (8, 6), 82),
        Card("rtx4060-8g", "NVIDIA RTX 4060 8 GB", 8188, 272, (8, 9), 24),
        Card("rtx4060ti-16g", "NVIDIA RTX 4060 Ti 16 GB", 16380, 288, (8, 9), 34),
        Card("rtx4070-12g", "NVIDIA RTX 4070 12 GB", 12282, 504, (8, 9), 46),
        Card("rtx4080-16g", "NVIDIA RTX 4080 16 GB", 16376, 717, (8, 9), 76),
        Card("rtx4090-24g", "NVIDIA RTX 4090 24 GB", 24564, 1008, (8, 9), 128),
        Card("rtx5060ti-16g", "NVIDIA RTX 5060 Ti 16 GB", 16311, 448, (12, 0), 36),
        Card("rtx5070-12g", "NVIDIA RTX 5070 12 GB", 12227, 672, (12, 0), 48),
        Card("rtx5070ti-16g", "NVIDIA RTX 5070 Ti 16 GB", 16303, 896, (12, 0), 70),
        Card("rtx5080-16g", "NVIDIA RTX 5080 16 GB", 16303, 960, (12, 0), 84),
        Card("rtx5090-32g", "NVIDIA RTX 5090 32 GB", 32607, 1792, (12, 0), 170),
        Card("a4000-16g", "NVIDIA RTX A4000 16 GB", 16376, 448, (8, 6), 48),
        Card("a6000-48g", "NVIDIA RTX A6000 48 GB", 49140, 768, (8, 6), 84),
        Card("rtx6000ada-48g", "NVIDIA RTX 6000 Ada 48 GB", 49140, 960, (8, 9), 142),
        Card("t4-16g", "NVIDIA T4 16 GB", 15360, 320, (7, 5), 40),
        Card("v100-16g", "NVIDIA V100 16 GB", 16384, 900, (7, 0), 80),
        Card("v100-32g", "NVIDIA V100 32 GB", 32768, 900, (7, 0), 80),
        Card("l4-24g", "NVIDIA L4 24 GB", 23034, 300, (8, 9), 58),
        Card("a10-24g", "NVIDIA A10 24 GB", 23028, 600, (8, 6), 72),
        Card("l40s-48g", "NVIDIA L40S 48 GB", 46068, 864, (8, 9), 142),
        Card("a100-40g", "NVIDIA A100 SXM 40 GB", 40960, 1555, (8, 0), 108),
        Card("a100-80g", "NVIDIA A100 SXM 80 GB", 81920, 2039, (8, 0), 108),
        Card("h100-80g", "NVIDIA H100 SXM 80 GB", 81559, 3350, (9, 0), 132),
        Card("h100pcie-80g", "NVIDIA H100 PCIe 80 GB", 81559, 2000, (9, 0), 114),
        Card("h200-141g", "NVIDIA H200 SXM 141 GB", 143771, 4800, (9, 0), 132),
    )
}


def one_at_a_time() -> UsageError:
    """The error for several cards."""
    return UsageError("`gpu` takes one card at a time", "to compare cards, estimate each by itself")


def find_card(name: str) -> Card:
    """The card of that name; the size may be left out where a model has only one, and RTX. Raises UsageError."""
    if "," in name:
        raise one_at_a_time()
    wanted = re.sub(r"[\s_-]|nvidia|geforce|rtx|gtx", "", name.lower())
    found = [c for c in CARDS.values() if wanted in _short_names(c)]
    if len(found) == 1:
        return found[0]
    names = {c.name: c for c in CARDS.values()} | {short: c for c in CARDS.values() for short in _short_names(c)}
    close = [names[match].name for match in near(wanted, names, 5)]
    offered = [c.name for c in found] or list(dict.fromkeys(close))[:3]
    hint = meant(offered) or "kv estimate --list-gpus names the NVIDIA cards it knows;"
    raise UsageError(
        f"`gpu`: no card named '{name}' in the table", f"{hint} `memory=24G` `bandwidth=800` needs no name"
    )


def _short_names(card: Card) -> tuple[str, str]:
    """'rtx4090-24g' -> '409024g' and '4090'."""
    model, _, size = card.name.removeprefix("rtx").removeprefix("gtx").partition("-")
    return model + size, model


def card_of(title: str, total_bytes: int) -> Card | None:
    """The card that a driver calls `title` ("NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB")."""
    words = set(re.split(r"[\s-]+", title.lower()))
    found = [c for c in CARDS.values() if _words(c) <= words and not words & _VARIANTS - _words(c)]
    if not found:
        return None
    return max(found, key=lambda c: (len(_words(c)), -abs(c.total_mib - (total_bytes >> 20))))


def _words(card: Card) -> set[str]:
    """What a driver's name of the card must hold: its model, without the size and the usual form."""
    return set(card.title.lower().split()[1:-2]) - {"sxm"}
