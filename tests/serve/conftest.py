"""One server for all tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import serving


@pytest.fixture(scope="session")
def server() -> Iterator[serving.Server]:
    with serving.running() as found:
        yield found
