"""Every function of another library that ours stands in front of, in the version at hand: what it
does not know goes on to the original, and a signature that does not fit is named in one sentence.
"""

from __future__ import annotations

import inspect

import pytest

from kt_sft import plugin


@pytest.fixture
def installed():
    plugin.install()
    yield list(plugin._installed)
    plugin.uninstall()
