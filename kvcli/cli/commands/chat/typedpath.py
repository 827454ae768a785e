"""Names of files as they are typed in a chat, or pasted."""

from __future__ import annotations

import os
import shlex


def path_of(text: str) -> str:
    """The file that is meant: the one of that very name, if there is one; else without the quotes and backslashes that
    a shell would take off, which a terminal adds to what is dragged into it. ~ is the home folder."""
    if os.path.lexists(text):
        return text
    try:
        words = shlex.split(text)
    except ValueError:  # a lone quote
        words = []
    return os.path.expanduser(words[0] if len(words) == 1 else text)
