"""Members of a namespace that are listed in etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.aggregator.cluster import config
from ckpt.aggregator.cluster.etcd import AnnouncedNode
from helpers.etcd_server import EtcdProcess, needs_etcd, running_etcd  # noqa: F401  a fixture

FACTS = AnnouncedNode("127.0.0.1:7070", "r1/h1", 2.0, "disk-1")


def configure_namespace(folder: Path, monkeypatch: pytest.MonkeyPatch, endpoints: str, *lines: str) -> None:
    """Configure ckpt://lab as the cluster `lab` of these etcd servers."""
    file = folder / "config.toml"
    table = ["[namespaces.lab]", f'members = "etcd://{endpoints}/lab"', "deadline_seconds = 5.0", *lines]
    file.write_text("\n".join(table))
    monkeypatch.setenv("CKPT_CONFIG", str(file))
    monkeypatch.setattr(config, "_last_announced", {})
