"""What the tests of the pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.sessions import Sessions


@pytest.fixture(scope="session")
def sessions() -> Iterator[Sessions]:
    """Where the blocks of a page run."""
    sessions = Sessions()
    yield sessions
    sessions.close()
