"""Headers by what a user types."""

from __future__ import annotations

from kvcli.runtime.headers import readheader
from kvcli.runtime.headers.modelheaders import ModelHeader
from kvcli.runtime.hub.modelref import ModelRef


def read_header(name: str, offline: bool = False) -> ModelHeader:
    """The header of a model that is no recipe."""
    return readheader.read_header(ModelRef.parse(name, planning=True), offline=offline)
