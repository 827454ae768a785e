"""`kv estimate`: what a model needs before it is loaded."""

from kvcli.cli.commands.estimate.command import register

__all__ = ["register"]
