"""`kv bench`: how fast a model is on this machine, and what its caches are worth."""

from kvcli.cli.commands.bench.command import register

__all__ = ["register"]
