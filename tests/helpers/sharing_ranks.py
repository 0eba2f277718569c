"""Ranks that share reads through memory, or through messages."""

from __future__ import annotations

import pytest

from ckpt.loading.shared_window import SharedWindow
from helpers.rank_threads import RemoteStore


@pytest.fixture(params=["memory", "messages"])
def sharing_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share reads of a remote store: through memory, as on one host, or by messages, as on several."""
    monkeypatch.setattr("ckpt.loading.shared_read.LocalStore", RemoteStore)
    if request.param == "messages":
        monkeypatch.setattr(SharedWindow, "create", lambda *_: None)
