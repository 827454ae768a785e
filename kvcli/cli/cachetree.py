"""The files of the store as a tree: which one goes on from which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvcli.cli.cachefiles import Described
from kvcli.runtime.promptcache.store import chain_of


@dataclass
class Node:
    """A file, and those that go on from it, the largest branch first."""

    file: Described
    below: list[Node] = field(default_factory=list)


def parents(files: Sequence[Described]) -> dict[Path, Described]:
    """The file that each one goes on from: the one with the most of what comes before it. None for those that begin
    with their prompt, and for those whose beginning is gone."""
    behind: dict[tuple[Path, str], list[tuple[int, Described]]] = defaultdict(list)  # where a file could go on
    for file in files:
        if file.contents is not None:
            with suppress(ValueError, IndexError):  # of a name or an identity that makes no sense
                for tokens, digest in chain_of(file.contents, file.path.name.split("-")[1]):
                    behind[file.path.parent, digest].append((tokens, file))
    found = {}
    for file in files:
        if (c := file.contents) is not None and c.start:
            others = [each for each in behind.get((file.path.parent, c.parent), []) if each[1] is not file]
            if others:
                found[file.path] = max(others, key=lambda each: (each[0], each[1].used_at))[1]
    return found


def starting(file: Described, above: Mapping[Path, Described]) -> str:
    """Where later prompts can go on from a file, see `Described.starting`, or "needs the first 448" where no file has
    what comes before it. `above`: see `parents`, which do not tell that of rows behind which something was evicted."""
    top = file
    while top.path in above:
        top = above[top.path]
    start = top.contents.start if top.contents and top.identity.get("eviction", "none") == "none" else 0
    return f"needs the first {start:,}" if start else file.starting


def trees(files: Sequence[Described]) -> list[Node]:
    """Those that go on from no other, in the given order, with all that goes on from them."""
    above = parents(files)
    nodes = {file.path: Node(file) for file in files}
    for file in files:
        if file.path in above:
            nodes[above[file.path].path].below.append(nodes[file.path])
    for node in nodes.values():
        node.below.sort(key=lambda each: (each.file.contents.start if each.file.contents else 0, each.file.path))
    return [node for path, node in nodes.items() if path not in above]


def rows(roots: Sequence[Node]) -> Iterator[tuple[str, Described]]:
    """The files from top to bottom, each with the lines that lead to it. An only one below another stands right below
    it: long chats are long chains."""
    for root in roots:
        yield "", root.file
        yield from _below(root.below, "")


def _below(nodes: Sequence[Node], above: str) -> Iterator[tuple[str, Described]]:
    for node in nodes:
        last = node is nodes[-1]
        yield above + ("`- " if last else "|- "), node.file
        yield from _below(node.below, above if len(nodes) == 1 else above + "| ")
