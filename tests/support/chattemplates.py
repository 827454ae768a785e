"""Chat templates in the manner of model families: written here, with the features of Jinja that theirs use."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_suffix("")
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.jinja"))}
