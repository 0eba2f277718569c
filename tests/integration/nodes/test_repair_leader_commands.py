"""Commands that drain, forget and rebalance members keep to their rate and show their progress."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.nodes import directories

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.testing import random_bytes
from ckpt.tools.node import command


@pytest.mark.parametrize("what", ["drain", "forget", "rebalance"])
def test_commands_keep_to_their_rate_and_know_their_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """They write no faster than --rate, and their progress bar knows the total."""
    config = tmp_path / "config.toml"
    folders = [f"{tmp_path}/disk{i}" for i in range(5 if what == "rebalance" else 4)]
    members = ", ".join(f'{{ url = "{folder}", name = "disk{i}" }}' for i, folder in enumerate(folders))
    config.write_text(f"[namespaces.n]\nmembers = [{members}]\n")
    before = Namespace(directories(tmp_path, 4))
    for i in range(20):
        before.put(f"f{i}", random_bytes(200_000, i))
    before.settle([f"/f{i}" for i in range(20)])
    before.close()
    monkeypatch.setenv("CKPT_CONFIG", str(config))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    began = time.monotonic()
    member = [] if what == "rebalance" else ["disk1"]
    done = CliRunner().invoke(command, ["admin", what, "ckpt://n", *member, "--rate", "1200kB"], standalone_mode=False)
    seconds = time.monotonic() - began
    assert done.exception is None, done.output
    found = re.search(r"(\d+) files moved, ([\d.]+) (kB|MB)", done.output)
    assert found is not None, done.output
    moved = float(found[2]) * {"kB": 1e3, "MB": 1e6}[found[3]]
    assert moved >= 200_000
    assert seconds >= 0.9 * moved / 1200e3
    totals = {float(text) for text in re.findall(r"[\d.]+/([\d.]+) [kM]B", done.output)}
    assert max(totals) == float(found[2])
