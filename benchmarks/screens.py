"""The screens of docs/cli.md that `kv estimate` prints, written into it between their markers.

    python benchmarks/screens.py [--check]

`--check` changes nothing and exits with 1 if a screen there is not what `kv` prints now.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
SCREENS = {
    "8b-12g": ("estimate", "llama-3.1-8b", "--gpu", "rtx3060-12g", "-c", "65536"),
    "8b-80g": ("estimate", "llama-3.1-8b", "--gpu", "h100-80g", "-c", "131072"),
}


def screen(arguments: tuple[str, ...]) -> str:
    """What `kv` prints with these arguments, for a user who has not measured a machine."""
    with tempfile.TemporaryDirectory() as state:
        folders = dict.fromkeys(("XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), state)
        environment = os.environ | folders | {"COLUMNS": "80"}
        done = subprocess.run(
            [sys.executable, "-m", "kvcli", *arguments], capture_output=True, text=True, env=environment, check=True
        )
    return f"$ kv {' '.join(arguments)}\n{done.stdout}"


def main() -> None:
    old = new = PAGE.read_text("utf-8")
    for name, arguments in SCREENS.items():
        block = f"<!-- {name} -->\n```\n{screen(arguments)}```\n<!-- end -->"
        new = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, text=block: text, new, flags=re.S)
    if "--check" in sys.argv:
        sys.exit(old != new)
    PAGE.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
