"""Paths and URLs of a namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.aggregator.cluster import config
from ckpt.aggregator.records.paths import check_path
from ckpt.storage.base.errors import (
    InvalidArgument,
    InvalidName,
)

BAD_PATHS = ["", "..", "a/../b", "/a", "a/", "a//b", ".", "a/./b", "a\nb", "a\x00", "x" * 256, "/".join(["y" * 200] * 6)]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_invalid_paths_are_refused(path: str) -> None:
    with pytest.raises(InvalidName, match="can't name a file"):
        check_path(path)


@pytest.mark.parametrize("path", ["a", ".hidden", "a b/ü/c.d", "日本", "x" * 255, "zarr.json", "c/0/0"])
def test_valid_paths_are_accepted(path: str) -> None:
    assert check_path(path) == path


def test_urls_and_configuration_files_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("ckpt://nowhere/x", r"no \[namespaces.nowhere\]; add it, or name one that it has \(a, b, c, d\)"),
        ("ckpt://a/x", "is not a member: use host:port"),
        ("ckpt://b/x", "unknown key 'wieght'"),
        ("ckpt://c/x", r"c.toml, \[namespaces.c\]: deadline_seconds is 'soon'; it must be a number of seconds"),
        ("ckpt://h:1,h:1/x", "is listed twice"),
        ("ckpt://127.0.0.1:99999/x", r"^ckpt://127.0.0.1:99999: the port of 127.0.0.1:99999 must be 1 to 65535$"),
        ("ckpt://h:1,[::1]:0/x", r"the port of \[::1\]:0 must be 1 to 65535$"),
        ("ckpt://d/x", r"c.toml, \[namespaces.d\]: the port of h:65536 must be 1 to 65535$"),
        ("ckpt://h:1,h:2/x?redundancy=3x", "needs 3 members, there are 2"),
        ("ckpt://h:1,h:2/x?redundancy=much", "use 1x, 2x, 3x"),
        ("ckpt://h:1/x?what=1", "unknown option 'what'"),
        ("ckpt://~\0,h:1/x", "zero byte in the names of the members"),
    ],
)
def test_wrong_urls_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, message: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[namespaces.a]\nmembers = ["hdfs://b"]\n[namespaces.b]\nmembers = [{url = "h:1", wieght = 2}]\n')
    with file.open("a") as opened:
        opened.write(
            '[namespaces.c]\nmembers = ["h:1"]\ndeadline_seconds = "soon"\n[namespaces.d]\nmembers = ["node://h:65536"]\n'
        )
    monkeypatch.setenv("CKPT_CONFIG", str(file))
    with pytest.raises(InvalidArgument, match=message):
        config.parse_namespace_url(url)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff", b"[namespaces", b"namespaces = 3", b"namespaces = [1]", b"[namespaces]\nlab = []", b"[namespaces]\nlab = 'x'",
        b"x = " + 2000 * b"[", b"[namespaces.lab]\nmembers = 3", b"[namespaces.lab]\nmembers = [[]]",
    ],
    ids=lambda content: repr(content[:40]),
)  # fmt: skip
def test_a_wrong_configuration_file_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    monkeypatch.setenv("CKPT_CONFIG", str(file))
    with pytest.raises(InvalidArgument) as refused:
        config.parse_namespace_url("ckpt://lab/x")
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("members = [{ url = 'h:1', name = 5 }]", "name is 5; write a string in quotes"),
        ("members = [{ url = '/mnt/a', name = 5 }]", "name is 5; write a string in quotes"),
        ("members = [{ url = 's3://b/a', name = true }]", "name is True; write a string in quotes"),
        ("members = [{ url = 5 }]", "url is 5; write a string in quotes"),
        ("members = [{ name = 'disk0' }]", "url is missing; write a string in quotes"),
        ("members = [5]", "url is 5; write a string in quotes"),
        ("members = [{ url = 'h:1', domain = 5 }]", "domain is 5; write a string in quotes"),
        ("members = [{ url = 'h:1', domain = ['r', 'h'] }]", "domain is ['r', 'h']; write a string in quotes"),
        ("members = [{ url = 'h:1', weight = true }]", "the weight of h:1 is True; it must be from 0 to below 1e+09"),
        ("members = [{ url = 'h:1', weight = 'heavy' }]", "the weight of h:1 is 'heavy'; it must be from 0 to below 1e+09"),
        ("members = ['h:1']\nredundancy = 2", "redundancy is 2; write a string in quotes"),
        ("members = ['h:1']\nnear = 1", "near is 1; write a string in quotes"),
        ("members = ['h:1']\nnear = []", "near is []; write a string in quotes"),
        (
            "members = ['h:1']\ndeadline_seconds = true",
            "deadline_seconds is True; it must be a number of seconds, such as 10.0",
        ),
        ("members = ['h:1']\ntoken_file = false", "token_file False can't be read: write the path of a file as a string"),
        ("members = ['h:1']\nca_file = 0", "ca_file 0 can't be read: write the path of a file as a string"),
        ("members = ['h:1']\nca_file = []", "ca_file [] can't be read: write the path of a file as a string"),
    ],
)
def test_a_value_of_another_type_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, message: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"[namespaces.lab]\n{entry}\n")
    monkeypatch.setenv("CKPT_CONFIG", str(file))
    with pytest.raises(InvalidArgument) as refused:
        config.parse_namespace_url("ckpt://lab/x")
    assert str(refused.value) == f"{file}, [namespaces.lab]: {message}"


def test_a_token_file_that_is_not_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_bytes(b"\xff" * 32)
    for entry in (f"token_file = '{tmp_path}/token'", "token_file = 3", "ca_file = ['a']", "cert_file = 1.5"):
        (tmp_path / "c.toml").write_text(f"[namespaces.lab]\nmembers = ['h:1']\n{entry}\n")
        monkeypatch.setenv("CKPT_CONFIG", str(tmp_path / "c.toml"))
        with pytest.raises(InvalidArgument, match="can't be read"):
            config.parse_namespace_url("ckpt://lab/x")
    monkeypatch.setenv("CKPT_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(InvalidArgument, match="token can't be read: it is not text"):
        config.parse_namespace_url("ckpt://h:1/x")


@pytest.mark.parametrize("entry", ["token_file", "ca_file", "cert_file", "key_file"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [("missing", "No such file or directory"), (".", "Is a directory"), ("c.toml/x", "Not a directory")],
)
def test_an_entry_whose_file_can_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, path: str, reason: str
) -> None:
    file = tmp_path / "c.toml"
    pair = f"cert_file = '{file}'\n" if entry == "key_file" else ""
    file.write_text(f"[namespaces.lab]\nmembers = ['h:1']\n{pair}{entry} = '{tmp_path / path}'\n")
    monkeypatch.setenv("CKPT_CONFIG", str(file))
    with pytest.raises(InvalidArgument) as refused:
        config.parse_namespace_url("ckpt://lab/x")
    advice = "name a file that this user can read"
    assert str(refused.value) == f"{file}, [namespaces.lab]: {entry} {tmp_path / path} can't be read: {reason}; {advice}"


@pytest.mark.parametrize("variable", ["CKPT_TOKEN_FILE", "CKPT_CA_FILE", "CKPT_CONFIG"])
@pytest.mark.parametrize(("path", "reason"), [("missing", "No such file or directory"), (".", "Is a directory")])
def test_a_variable_whose_file_can_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, path: str, reason: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / path))
    with pytest.raises(InvalidArgument) as refused:
        config.parse_namespace_url("ckpt://lab/x" if variable == "CKPT_CONFIG" else "ckpt://h:1/x")
    message = str(refused.value)
    assert variable in message
    assert "dmesg" not in message
    if variable != "CKPT_CONFIG":
        assert message == f"{variable} {tmp_path / path} can't be read: {reason}; name a file that this user can read"
