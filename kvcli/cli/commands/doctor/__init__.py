"""`kv doctor`: what this machine is."""

from kvcli.cli.commands.doctor.command import register

__all__ = ["register"]
