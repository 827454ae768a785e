"""`kv chat` as a command that has commands below it."""

from __future__ import annotations

from typing import Any

from kvcli.cli.app import Group
from kvcli.errors import UsageError
from kvcli.words import meant, near

OTHER_NAMES = {
    "list": "ls", "sessions": "ls", "history": "show", "cat": "show", "save": "export", "delete": "rm", "remove": "rm",
}  # fmt: skip


class ChatGroup(Group):
    """Without a command a chat begins. A word that is none calls one by another name, or is what someone would say."""

    alone = True

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises UsageError."""
        word = args[0]
        if word in OTHER_NAMES:
            raise UsageError(f"no such command: kv chat {word}", meant([f"kv chat {OTHER_NAMES[word]}"]))
        if word in self.commands or near(word, self.commands):
            return super().resolve_command(ctx, args)
        raise UsageError(
            f"kv chat takes no message: '{word}'", "start kv chat and type it, or ask one question with kv run"
        )
