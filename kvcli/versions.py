"""Which `kv` this is, and what it runs on. Reads metadata only: neither torch nor any other library is imported."""

from __future__ import annotations

from pathlib import Path

from kvcli import __version__

TYPE_CHECKING = False  # as in cli/main.py
if TYPE_CHECKING:
    from typing import Any

COMMIT_FILE = "_commit"  # in the package, written by setup.py
LIBRARIES = ("torch", "triton", "numpy", "tokenizers", "typer")
_PACKAGE = Path(__file__).resolve().parent


def short() -> str:
    return f"kv {__version__}"


def lines() -> list[str]:
    """For people who report a bug."""
    import platform

    found = [f"{name} {version or 'not installed'}" for name, version in libraries().items()]
    return [
        f"{short()} (commit {commit() or 'not known'})",
        f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}",
        ", ".join(found),
        str(_PACKAGE),
    ]


def as_object() -> dict[str, Any]:
    """Versions, system and folder for programs, as JSON has them."""
    import platform

    system = f"{platform.system()} {platform.release()}"
    return {
        "version": __version__,
        "commit": commit(),
        "path": str(_PACKAGE),
        "system": {"os": system, "machine": platform.machine(), "python": platform.python_version()},
        "packages": libraries(),
    }


def libraries() -> dict[str, str | None]:
    """Their versions; None = not installed."""
    import importlib.metadata

    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit this `kv` is made of: as the build noted it, as pip did for an address, or as the checkout says."""
    try:
        return (_PACKAGE / COMMIT_FILE).read_text("ascii").strip()
    except OSError:
        return of_checkout(_PACKAGE.parent) or _of_address()


def of_checkout(root: Path) -> str | None:
    """The commit of a git checkout, "-dirty" behind it where files were changed; None where there is no checkout."""
    if not (root / ".git").exists():
        return None
    import subprocess

    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _of_address() -> str | None:
    """The commit of `pip install git+https://...`, which direct_url.json tells (PEP 610)."""
    import importlib.metadata
    import json

    try:
        text = importlib.metadata.distribution("kvcli").read_text("direct_url.json")
        found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    return str(found)[:12] if found else None
