"""Placement and redundancy of files over members, and the erasure code."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from helpers.namespace_files import member_objects
from helpers.nodes import LocalNode, nodes_config, quick
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.cluster.member_facts import failure_domains
from ckpt.aggregator.file_io.namespace import Namespace, open_namespace
from ckpt.aggregator.maintenance import rebalance
from ckpt.aggregator.placement import erasure, rendezvous_hash
from ckpt.aggregator.placement.redundancy import Redundancy, parse_redundancy
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation, choose_members, max_fragments_per_domain
from ckpt.storage.base.errors import (
    InvalidArgument,
)
from ckpt.storage.member.device import MemberInfo
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import random_bytes


def test_redundancy_is_parsed_or_refused() -> None:
    assert parse_redundancy("1x") == Redundancy(1, 0)
    assert parse_redundancy("3x") == Redundancy(1, 2)
    assert parse_redundancy("4+2") == Redundancy(4, 2)
    assert [str(parse_redundancy(t)) for t in ("1x", "2x", "8+3")] == ["1x", "2x", "8+3"]
    for wrong in ("", "0x", "2", "x", "4+0", "40+2", "-1x", "2x2", "4+2+1"):
        with pytest.raises(InvalidArgument, match="use 1x, 2x, 3x for copies"):
            parse_redundancy(wrong)


LOCATIONS = [
    MemberLocation(f"s{s}r{r}h{h}", (f"s{s}", f"s{s}r{r}", f"s{s}r{r}h{h}"))
    for s in range(2)
    for r in range(3)
    for h in range(4)
]


@pytest.mark.parametrize("below", [1, 512, 1024, 1025, 1 << 40])
def test_each_hash_gives_a_score(monkeypatch: pytest.MonkeyPatch, below: int) -> None:
    hashed = (1 << 64) - below
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data: hashed)  # no key with such a hash is known
    score = rendezvous_hash.score("key", MemberLocation("a"))
    quotient = (hashed + 0.5) / 2.0**64
    assert score == -1 / math.log(quotient if quotient < 1 else 1 - 2.0**-53)
    assert rendezvous_hash.score("key", MemberLocation("a", weight=2.0)) == 2 * score


@given(st.text(max_size=20), st.integers(1, 24))
def test_placement_spreads_over_failure_domains(key: str, count: int) -> None:
    chosen = choose_members(key, LOCATIONS, count)
    assert len(set(chosen)) == count
    assert max_fragments_per_domain(chosen, LOCATIONS) == -(-count // 2), "both sites have the same number"
    racks = [name[:4] for name in chosen]
    assert max(map(racks.count, racks)) == -(-count // 6)
    assert choose_members(key, LOCATIONS, 3, host_domain=("s1", "s1r2"))[0].startswith("s1r2"), "the first is near the writer"
    assert not set(choose_members(key, LOCATIONS, 20, excluded=chosen)) & set(chosen)


def test_placement_is_weighted_and_stable() -> None:
    locations = [MemberLocation("a"), MemberLocation("b"), MemberLocation("c", weight=2.0), MemberLocation("none", weight=0)]
    won = [choose_members(str(i), locations, 1)[0] for i in range(4000)]
    assert 1800 < won.count("c") < 2200
    assert "none" not in won
    grown = [choose_members(str(i), [*locations, MemberLocation("d")], 1)[0] for i in range(4000)]
    assert {b for a, b in zip(won, grown, strict=True) if a != b} == {"d"}, "only the parts of the new member move"


def slow_multiply(a: int, b: int) -> int:
    """Return the product in GF(2^8) with the polynomial 0x11d, computed bit by bit."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def slow_inverse(a: int) -> int:
    """Return the inverse in GF(2^8), found by trying all elements."""
    return next(b for b in range(256) if slow_multiply(a, b) == 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10), st.integers(1, 5), st.integers(1, 300), st.randoms(use_true_random=False))
def test_the_erasure_code_agrees_with_a_slow_reference(k: int, m: int, length: int, draw: random.Random) -> None:
    shares = [np.frombuffer(draw.randbytes(length), np.uint8) for _ in range(k)]
    parity = [np.empty(length, np.uint8) for _ in range(m)]
    erasure.ErasureCode(k, m).encode(shares, parity)
    for j in range(m):
        expected = np.zeros(length, np.uint8)
        for i in range(k):
            factor = slow_inverse((k + j) ^ i)  # Cauchy: 1 / (x_j + y_i)
            expected ^= np.array([slow_multiply(factor, int(b)) for b in shares[i]], np.uint8)
        assert np.array_equal(parity[j], expected)
    shares_and_parity = dict(enumerate([*shares, *parity]))
    lost = draw.sample(range(k + m), draw.randint(1, m))
    into = {i: np.empty(length, np.uint8) for i in lost}
    erasure.ErasureCode(k, m).reconstruct({i: s for i, s in shares_and_parity.items() if i not in lost}, into)
    assert all(np.array_equal(into[i], shares_and_parity[i]) for i in lost)


def test_failure_domains_follow_the_url_or_the_labels_of_members() -> None:
    def info(*labels: tuple[str, str]) -> MemberInfo:
        return MemberInfo("x", 0, 0, labels=labels)

    none: tuple[str, ...] = ()
    assert failure_domains({"a": none, "b": ("r9",)}, {"a": info()}) == {"a": (), "b": ("r9",)}
    infos = {"a": info(("rack", "r1"), ("host", "h1")), "b": info(("rack", "r2"))}
    assert failure_domains({"a": none, "b": ("r9",), "c": none}, infos) == {"a": ("r1", "h1"), "b": ("r9",), "c": ("c", "c")}
    assert failure_domains({"a": ("a",), "b": ("b",), "c": ("c",)}, infos)["a"] == ("r1", "h1", "a"), "near= uses the name"


@pytest.mark.slow
def test_labels_of_nodes_keep_copies_in_different_racks(tmp_path: Path) -> None:
    """Six nodes in three racks, named by their addresses only: the two copies of a file are never in one rack."""
    nodes = [LocalNode(tmp_path / f"n{i}", NodeOptions(labels=(("rack", f"r{i // 2}"), ("host", f"h{i}")))) for i in range(6)]
    rack = {node.address: f"r{i // 2}" for i, node in enumerate(nodes)}
    url = f"ckpt://{','.join(rack)}"
    for near in ("", f"&near={nodes[3].address}"):
        namespace, _ = open_namespace(f"{url}/?redundancy=2x{near}")
        for i in range(30):
            namespace.put(f"f{i}", random_bytes(70_000, i))
            members = [member for member, _ in member_objects(namespace, f"f{i}")]
            assert len({rack[m] for m in members}) == 2
            assert not near or nodes[3].address in members
    assert {s.domain[0] for s in namespace.ring.members} == {"r0", "r1", "r2"}, "records are spread, too"
    nodes[0].close()  # a client that connects now can't learn the domain of this node
    later = quick(nodes_config(nodes))
    for i in range(10):
        later.put(f"g{i}", random_bytes(70_000, i))
        assert len({rack[m] for m, _ in member_objects(later, f"g{i}")}) == 2
    done = subprocess.run(
        [sys.executable, "-m", "ckpt.tools.node", "admin", "status", f"{url}/"], capture_output=True, text=True, check=False
    )
    assert all(f"r{i // 2}/h{i}" in done.stdout for i in range(1, 6)), done.stdout + done.stderr
    for node in nodes[1:]:
        node.close()


def test_one_node_under_two_names_is_refused(tmp_path: Path) -> None:
    """Two copies on it would be lost together."""
    node, other = LocalNode(tmp_path / "n0"), LocalNode(tmp_path / "n1")
    port = node.address.rpartition(":")[2]
    twice, _ = open_namespace(f"ckpt://{node.address},localhost:{port}/?redundancy=2x")
    with pytest.raises(InvalidArgument, match=f"{node.address} and localhost:{port} are the same device"):
        twice.put("a", random_bytes(100_000))
    assert not twice.exists()
    folders = [str(tmp_path / "d"), f"{tmp_path}/x/../d"]
    with pytest.raises(InvalidArgument, match="are the same device"):
        Namespace(config_from_table("test", {"members": folders, "redundancy": "2x"}, "the test")).put("a", b"1")
    good, _ = open_namespace(f"ckpt://{node.address},{other.address}/")
    good.put("a", random_bytes(100_000))
    grown, _ = open_namespace(f"ckpt://{node.address},{other.address},localhost:{port}/")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="are the same device"):
            grown.put("b", random_bytes(100_000))
    with pytest.raises(InvalidArgument, match="are the same device"):
        rebalance.rebalance_fragments(grown)
    assert grown.get("a") == random_bytes(100_000)
    assert set(grown.ring.all_members) == {node.address, other.address}
    for each in (node, other):
        each.close()
