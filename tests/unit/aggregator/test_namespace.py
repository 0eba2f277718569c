"""Files of a namespace outlive the loss of members, and paths, URLs and redundancies are checked."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.namespaces import holders, objects
from helpers.nodes import Here, directories, nodes_config, quick
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.aggregator.cluster import config
from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.cluster.member_facts import failure_domains
from ckpt.aggregator.file_io.namespace import Namespace, open_namespace
from ckpt.aggregator.maintenance import rebalance
from ckpt.aggregator.placement import erasure
from ckpt.aggregator.placement.redundancy import Redundancy, parse_redundancy
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation, choose_members, max_parts_per_domain
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.paths import check_path
from ckpt.storage.base.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidArgument,
    InvalidName,
    StoreError,
)
from ckpt.storage.member.device import MemberInfo
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import random_bytes


def test_redundancies() -> None:
    assert parse_redundancy("1x") == Redundancy(1, 0)
    assert parse_redundancy("3x") == Redundancy(1, 2)
    assert parse_redundancy("4+2") == Redundancy(4, 2)
    assert [str(parse_redundancy(t)) for t in ("1x", "2x", "8+3")] == ["1x", "2x", "8+3"]
    for wrong in ("", "0x", "2", "x", "4+0", "40+2", "-1x", "2x2", "4+2+1"):
        with pytest.raises(InvalidArgument, match="use 1x, 2x, 3x for copies"):
            parse_redundancy(wrong)


SPOTS = [
    MemberLocation(f"s{s}r{r}h{h}", (f"s{s}", f"s{s}r{r}", f"s{s}r{r}h{h}"))
    for s in range(2)
    for r in range(3)
    for h in range(4)
]


@given(st.text(max_size=20), st.integers(1, 24))
def test_placement_spreads(key: str, count: int) -> None:
    chosen = choose_members(key, SPOTS, count)
    assert len(set(chosen)) == count
    assert max_parts_per_domain(chosen, SPOTS) == -(-count // 2), "both halves of the machine take as much"
    racks = [name[:4] for name in chosen]
    assert max(map(racks.count, racks)) == -(-count // 6)
    assert choose_members(key, SPOTS, 3, host_domain=("s1", "s1r2"))[0].startswith("s1r2"), "the first is near the writer"
    assert not set(choose_members(key, SPOTS, 20, excluded=chosen)) & set(chosen)


def test_placement_is_weighted_and_stable() -> None:
    spots = [MemberLocation("a"), MemberLocation("b"), MemberLocation("c", weight=2.0), MemberLocation("none", weight=0)]
    won = [choose_members(str(i), spots, 1)[0] for i in range(4000)]
    assert 1800 < won.count("c") < 2200
    assert "none" not in won
    grown = [choose_members(str(i), [*spots, MemberLocation("d")], 1)[0] for i in range(4000)]
    assert {b for a, b in zip(won, grown, strict=True) if a != b} == {"d"}, "only what the new one takes moves"


def slow_multiply(a: int, b: int) -> int:
    """In GF(2^8) with the polynomial 0x11d, bit by bit."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def slow_inverse(a: int) -> int:
    return next(b for b in range(256) if slow_multiply(a, b) == 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10), st.integers(1, 5), st.integers(1, 300), st.randoms(use_true_random=False))
def test_the_code_is_that_of_a_slow_reference(k: int, m: int, length: int, draw: random.Random) -> None:
    shares = [np.frombuffer(draw.randbytes(length), np.uint8) for _ in range(k)]
    parity = [np.empty(length, np.uint8) for _ in range(m)]
    erasure.ErasureCode(k, m).encode(shares, parity)
    for j in range(m):
        want = np.zeros(length, np.uint8)
        for i in range(k):
            factor = slow_inverse((k + j) ^ i)  # Cauchy: 1 / (x_j + y_i)
            want ^= np.array([slow_multiply(factor, int(b)) for b in shares[i]], np.uint8)
        assert np.array_equal(parity[j], want)
    every = dict(enumerate([*shares, *parity]))
    lost = draw.sample(range(k + m), draw.randint(1, m))
    into = {i: np.empty(length, np.uint8) for i in lost}
    erasure.ErasureCode(k, m).reconstruct({i: s for i, s in every.items() if i not in lost}, into)
    assert all(np.array_equal(into[i], every[i]) for i in lost)


BAD_PATHS = ["", "..", "a/../b", "/a", "a/", "a//b", ".", "a/./b", "a\nb", "a\x00", "x" * 256, "/".join(["y" * 200] * 6)]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_paths_that_are_refused(path: str) -> None:
    with pytest.raises(InvalidName, match="can't name a file"):
        check_path(path)


@pytest.mark.parametrize("path", ["a", ".hidden", "a b/ü/c.d", "日本", "x" * 255, "zarr.json", "c/0/0"])
def test_paths_that_are_good(path: str) -> None:
    assert check_path(path) == path


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, path = config.parse_namespace_url("ckpt://h1:7070,h2:7071/run/a?redundancy=1x")
    assert [m.address for m in parsed.members] == ["h1:7070", "h2:7071"]
    assert (path, str(parsed.redundancy)) == ("run/a", "1x")
    six = ",".join(f"h{i}:1" for i in range(6))
    for text in ("4+2", "4%2B2"):
        assert str(config.parse_namespace_url(f"ckpt://{six}/x?redundancy={text}")[0].redundancy) == "4+2"
    file = tmp_path / "c.toml"
    file.write_text(
        '[namespaces.lab]\nredundancy = "2x"\nnear = "r1/h1"\n'
        'members = ["h1:1", { url = "node://h2:2", domain = "r1/h2", weight = 2 }, { url = "/mnt/a", name = "disk" }]\n'
    )
    monkeypatch.setenv("CKPT_CONFIG", str(file))
    parsed, _ = config.parse_namespace_url("ckpt://lab/x")
    assert [(m.name, m.location.domain, m.location.weight) for m in parsed.members] == [
        ("h1:1", (), 1.0), ("h2:2", ("r1", "h2"), 2.0), ("disk", (), 1.0),
    ]  # fmt: skip
    assert parsed.host_domain == ("r1", "h1")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ckpt://", "write ckpt://host:port"),
        ("ckpt://nowhere/x", r"no \[namespaces.nowhere\]; it has a, b, c"),
        ("ckpt://a/x", "is not a member: use host:port"),
        ("ckpt://b/x", "unknown key 'wieght'"),
        ("ckpt://c/x", r"c.toml, \[namespaces.c\]: deadline_seconds is 'soon'; it must be a number of seconds"),
        ("ckpt://h:1,h:1/x", "is listed twice"),
        ("ckpt://h:1,h:2/x?redundancy=3x", "needs 3 members, there are 2"),
        ("ckpt://h:1,h:2/x?redundancy=much", "use 1x, 2x, 3x"),
        ("ckpt://h:1/x?what=1", "unknown option 'what'"),
    ],
)
def test_wrong_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[namespaces.a]\nmembers = ["hdfs://b"]\n[namespaces.b]\nmembers = [{url = "h:1", wieght = 2}]\n')
    with file.open("a") as opened:
        opened.write('[namespaces.c]\nmembers = ["h:1"]\ndeadline_seconds = "soon"\n')
    monkeypatch.setenv("CKPT_CONFIG", str(file))
    with pytest.raises(InvalidArgument, match=message):
        config.parse_namespace_url(url)


def test_records_are_kept(tmp_path: Path) -> None:
    head = file_record.RecordHead("file", 5, 1.5, 2.5, "v")
    piece = file_record.Stripe(0, 5, (file_record.Fragment(0, 4096, b"s"), None), 5)
    for file in (
        file_record.PathRecord(head, inline_data=b"hello"),
        file_record.PathRecord(file_record.RecordHead("deleted", 0, 1.0, 2.0, "w")),
        file_record.PathRecord(
            head, layout=file_record.FileLayout(parse_redundancy("4+2"), (file_record.MemberObject("m", "n"),), (piece,))
        ),
    ):
        assert file_record.decode_record("p", file_record.encode_record(file)) == file
    with pytest.raises(IntegrityError, match="the record of p can't be read"):
        file_record.decode_record("p", file_record.RegisterValue(b"\xc1", b""))


@pytest.mark.parametrize("redundancy", ["1x", "2x", "3x", "2+1", "4+2"])
def test_files_of_many_pieces(tmp_path: Path, redundancy: str) -> None:
    namespace = Namespace(directories(tmp_path, 6, redundancy=redundancy))
    data = random_bytes(20_000_003)
    with namespace.create("big", None, len(data), aligned=False) as writer:
        at = 0
        for length in (1, 5_000_000, 4096, 9_000_000, 5_995_906):
            writer.append(memoryview(data)[at : at + length])
            at += length
        writer.commit()
    assert namespace.get("big") == data
    with namespace.open("big") as reader:
        draw = random.Random(0)
        for _ in range(200):
            start, length = draw.randrange(len(data)), draw.choice([1, 100, 4096, 300_000, 7_000_000])
            buffer = bytearray(length)
            got = reader.read_into(start, memoryview(buffer))
            assert bytes(buffer[:got]) == data[start : start + length]
    stored = sum(p.stat().st_size for p in objects(tmp_path))
    assert stored <= parse_redundancy(redundancy).overhead * len(data) * 1.02 + 20 * 4096 * 6
    namespace.delete(["big"])
    assert not objects(tmp_path)
    assert namespace.stat("big") is None
    namespace.close()


@pytest.mark.parametrize(("redundancy", "lost"), [("2x", 1), ("3x", 2), ("4+2", 2), ("2+1", 1)])
def test_whole_members_are_lost(tmp_path: Path, redundancy: str, lost: int) -> None:
    """Every choice of members, directories that are simply gone."""
    import itertools
    import shutil

    namespace = Namespace(directories(tmp_path / "all", 6, redundancy=redundancy))
    contents = {f"f{i}": random_bytes(n, i) for i, n in enumerate([0, 10, 32 << 10, 40_000, 3_000_000, 17_000_000])}
    for path, data in contents.items():
        namespace.put(path, data)
    namespace.close()
    for number, gone in enumerate(itertools.combinations(range(6), lost)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "all", folder)
        for i in gone:
            shutil.rmtree(folder / f"disk{i}")
            (folder / f"disk{i}").write_text("a file where the folder was: nothing can be made there")
        left = Namespace(directories(folder, 6, redundancy=redundancy))
        assert list(left.list()) == sorted(contents)
        for path, data in contents.items():
            assert left.get(path) == data, (path, gone)
        left.close()
        shutil.rmtree(folder)


def test_too_much_is_lost(tmp_path: Path) -> None:
    namespace = Namespace(directories(tmp_path, 4, redundancy="2x"))
    namespace.put("a", random_bytes(100_000))
    for member, name in holders(namespace, "a"):
        (tmp_path / member / "objects" / name).unlink()
    told = r"bytes 0 to 100000 of a in ckpt://test can't be read: 1 of 2 fragments are needed, 0 answer"
    with pytest.raises(StoreError, match=told):
        namespace.get("a")
    namespace.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_flipped_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """In as many fragments as may be lost: the content is read all the same. In one more: an error, never other bytes."""
    redundancy = data.draw(st.sampled_from(["1x", "2x", "2+1", "4+2"]))
    folder = tmp_path_factory.mktemp("flip")
    namespace = Namespace(directories(folder, 6, redundancy=redundancy))
    content = random_bytes(data.draw(st.integers(33_000, 900_000)))
    namespace.put("a", content)
    file = namespace.stat("a")
    assert file is not None
    assert file.layout is not None
    (piece,) = file.layout.stripes
    tolerated = parse_redundancy(redundancy).tolerated_losses
    count = data.draw(st.integers(0, tolerated + 1))
    hit = data.draw(st.permutations(range(len(piece.fragments))))[:count]
    for i in hit:
        fragment = piece.fragments[i]
        assert fragment is not None
        holder = file.layout.objects[fragment.object_index]
        path = folder / holder.member / "objects" / holder.name
        raw = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        else:
            raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        path.write_bytes(raw)
    try:
        assert namespace.get("a") == content
    except (IntegrityError, StoreError) as error:
        assert count > tolerated, error
        assert "can't be read" in str(error)
    namespace.close()


def test_replacing_and_appending(tmp_path: Path) -> None:
    namespace = Namespace(directories(tmp_path, 3))
    for content in (b"short", random_bytes(100_000), b"", random_bytes(200_000, 1)):
        namespace.put("a", content)
        assert namespace.get("a") == content
    assert len(objects(tmp_path)) == 2, "of what was replaced nothing is left"
    base = namespace.stat("a")
    with namespace.create("a", aligned=False, base=base) as writer:
        writer.append(memoryview(random_bytes(50_000, 2)))
        assert namespace.get("a") == random_bytes(200_000, 1), "not before it is done"
        writer.commit()
    assert namespace.get("a") == random_bytes(200_000, 1) + random_bytes(50_000, 2)
    with pytest.raises(AlreadyExists, match="a file of this name exists already"):
        namespace.put("a", b"new", new=True)
    namespace.make_folder("f")
    with pytest.raises(AlreadyExists, match="a folder of this name"):
        namespace.put("f", b"1")
    assert [(p, h.kind) for p, h in namespace.list().items()] == [("a", "file"), ("f", "folder")]
    namespace.close()


def test_of_two_clients_one_wins(tmp_path: Path) -> None:
    nodes = [Here(tmp_path / f"n{i}") for i in range(3)]
    clients = [Namespace(nodes_config(nodes)) for _ in range(3)]
    for attempt in range(8):
        size = [100, 100_000][attempt % 2]
        won: list[int] = []

        def put(i: int, attempt: int = attempt, size: int = size, won: list[int] = won) -> None:
            try:
                clients[i].put(f"race{attempt}", bytes([i]) * size, new=True)
                won.append(i)
            except AlreadyExists:
                pass

        threads = [threading.Thread(target=put, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert {c.get(f"race{attempt}") for c in clients} == {bytes(won) * size}
    for each in (*clients, *nodes):
        each.close()


def test_two_clients_that_replace(tmp_path: Path) -> None:
    clients = [Namespace(directories(tmp_path, 3)) for _ in range(2)]
    contents = [[random_bytes(50_000, 10 * i + j) for j in range(6)] for i in range(2)]
    threads = [
        threading.Thread(target=lambda i=i: [clients[i].put("a", data) for data in contents[i]])
        for i in range(2)  # type: ignore[misc]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clients[0].get("a") == clients[1].get("a")
    assert clients[0].get("a") in [contents[0][-1], contents[1][-1]]
    assert len(objects(tmp_path)) == 2
    for client in clients:
        client.close()


def test_domains_as_they_are_told() -> None:
    def info(*labels: tuple[str, str]) -> MemberInfo:
        return MemberInfo("x", 0, 0, labels=labels)

    none: tuple[str, ...] = ()
    assert failure_domains({"a": none, "b": ("r9",)}, {"a": info()}) == {"a": (), "b": ("r9",)}
    told = {"a": info(("rack", "r1"), ("host", "h1")), "b": info(("rack", "r2"))}
    assert failure_domains({"a": none, "b": ("r9",), "c": none}, told) == {"a": ("r1", "h1"), "b": ("r9",), "c": ("c", "c")}
    assert failure_domains({"a": ("a",), "b": ("b",), "c": ("c",)}, told)["a"] == ("r1", "h1", "a"), "near= names it"


def test_nodes_say_where_they_stand(tmp_path: Path) -> None:
    """Six nodes in three racks, named by their addresses only: the two copies of a file are never in one rack."""
    nodes = [Here(tmp_path / f"n{i}", NodeOptions(labels=(("rack", f"r{i // 2}"), ("host", f"h{i}")))) for i in range(6)]
    rack = {node.address: f"r{i // 2}" for i, node in enumerate(nodes)}
    url = f"ckpt://{','.join(rack)}"
    for near in ("", f"&near={nodes[3].address}"):
        namespace, _ = open_namespace(f"{url}/?redundancy=2x{near}")
        for i in range(30):
            namespace.put(f"f{i}", random_bytes(70_000, i))
            held = [member for member, _ in holders(namespace, f"f{i}")]
            assert len({rack[m] for m in held}) == 2
            assert not near or nodes[3].address in held
    assert {s.domain[0] for s in namespace.ring.members} == {"r0", "r1", "r2"}, "records are spread, too"
    nodes[0].close()  # of which it is not known where it stands, to whom comes now
    later = quick(nodes_config(nodes))
    for i in range(10):
        later.put(f"g{i}", random_bytes(70_000, i))
        assert len({rack[m] for m, _ in holders(later, f"g{i}")}) == 2
    done = subprocess.run(
        [sys.executable, "-m", "ckpt.tools.node", "admin", "status", f"{url}/"], capture_output=True, text=True, check=False
    )
    assert all(f"r{i // 2}/h{i}" in done.stdout for i in range(1, 6)), done.stdout + done.stderr
    for node in nodes[1:]:
        node.close()


def test_one_node_under_two_names(tmp_path: Path) -> None:
    """What is kept twice there would be lost at once."""
    node, other = Here(tmp_path / "n0"), Here(tmp_path / "n1")
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
