"""`kv eval`: what a model can still do with another cache."""

from kvcli.cli.commands.eval.command import register

__all__ = ["register"]
