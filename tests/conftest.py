"""Ranks that several test files share: started at the first use, ended with the session."""

from __future__ import annotations

import pytest
from rank_group import RankGroup


@pytest.fixture(scope="session")
def two_ranks():
    """A RankGroup of two."""
    with RankGroup(2) as group:
        yield group


@pytest.fixture(scope="session")
def three_ranks():
    """A RankGroup of three."""
    with RankGroup(3) as group:
        yield group
