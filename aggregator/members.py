"""From a URL to the members of a namespace.

    ckpt://host:port,host:port/path?redundancy=2x      nodes, by address; &near=host:port, the one of this host
    ckpt://NAME/path                                   what a TOML file says of NAME

The file is `$CKPT_CONFIG`, else `ckpt/config.toml` in the user's configuration folder. A member is a node, a directory of
this host or a bucket; all that is not said has a default:

    [namespaces.NAME]
    redundancy = "2x"               # of what is written without saying it
    near = "rack1/host1"            # the domains of this host: first copies stay there
    token_file = "/etc/ckpt/token"  # else $CKPT_TOKEN, or the file that $CKPT_TOKEN_FILE names
    ca_file = "/etc/ckpt/ca.pem"    # the wire is TLS then; cert_file and key_file where nodes ask for ours
    insecure = false                # true, or $CKPT_INSECURE=1: send the token to other hosts without TLS
    members = [
        "host3:7070",
        { url = "host4:7070", domain = "rack2/host4", weight = 2.0 },
        { url = "/mnt/nvme0", name = "disk0" },
        { url = "s3://bucket/folder", domain = "cloud" },
    ]

or, instead of the list, what nodes announced in etcd until the namespace was opened, whether they are up or not:

    members = "etcd://host:2379,host:2379/CLUSTER"
    etcd = { ca_file = "/etc/ckpt/etcd-ca.pem" }    # else the environment says it: see etcd_access.py
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ckpt.aggregator import etcd_access
from ckpt.aggregator.etcd_access import EtcdAccess
from ckpt.aggregator.placement import Spot
from ckpt.aggregator.redundancy import Redundancy, parse
from ckpt.storage.access import Access, insecure_allowed
from ckpt.storage.errors import InvalidArgument, Unavailable
from ckpt.storage.urls import OBJECT_SCHEMES

log = logging.getLogger("ckpt")

SCHEME = "ckpt"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.\-]+):(\d{1,5})")
_PLAIN = "/:,[]+=@*!"
"""Of a URL, besides letters, digits and _.-~: what stands for itself."""
_MEMBER_KEYS = {"url", "name", "domain", "weight"}
_KEYS = {
    "redundancy", "near", "token_file", "ca_file", "cert_file", "key_file", "deadline_seconds", "members", "insecure", "etcd",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """One place that keeps a part of a namespace."""

    spot: Spot
    address: str | None = None
    """host:port of a node; else `folder` or `bucket` is set."""
    folder: str | None = None
    bucket: str | None = None
    """The URL of a folder of a bucket."""

    @property
    def name(self) -> str:
        return self.spot.name


@dataclass(frozen=True, slots=True)
class Config:
    """A namespace as a client sees it."""

    name: str
    """For messages and URLs: what stands between ckpt:// and the path."""
    members: tuple[Member, ...]
    redundancy: Redundancy
    near: tuple[str, ...] = ()
    access: Access = field(default_factory=Access)
    announced: str = ""
    """The URL of etcd, where the members are from there."""
    etcd: EtcdAccess | None = None
    """How that etcd is reached."""


def parse_url(url: str) -> tuple[Config, str]:
    """The namespace of a URL, and the path in it. Raises InvalidArgument."""
    names, path, options = split_url(url)
    if not names:
        raise InvalidArgument(f"{url}: write ckpt://host:port,host:port/path, or ckpt://NAME/path with NAME in a TOML file")
    config = find(names)
    if "near" in options:
        config = _near(config, options["near"], url)
    if "redundancy" in options:
        config = replace(config, redundancy=parse(options["redundancy"]))
    return check(config), path


def split_url(url: str) -> tuple[str, str, dict[str, str]]:
    """What names the members, the path, and the options of a URL: each with %20 and the like undone. Raises InvalidArgument."""
    # Not urlsplit, which refuses several addresses where one of them is in brackets.
    scheme, _, rest = url.partition("://")
    if scheme != SCHEME:
        raise InvalidArgument(f"{url}: not a URL of a namespace, which begins with {SCHEME}://")
    where, _, query = rest.partition("?")
    names, _, path = where.partition("/")
    # Not parse_qs, which reads the + of 4+2 as a space.
    options = {key: unquote(value) for key, _, value in (item.partition("=") for item in query.split("&")) if key}
    if unknown := set(options) - {"redundancy", "near"}:
        raise InvalidArgument(f"{url}: unknown option {sorted(unknown)[0]!r}; there are redundancy= and near=")
    return _bare(unquote(names)), unquote(path).strip("/"), options


def join_url(names: str, path: str = "", **options: str | None) -> str:
    """The counterpart of `split_url`."""
    query = "&".join(f"{key}={quote(value, safe=_PLAIN)}" for key, value in options.items() if value)
    return f"{SCHEME}://{quote(names, safe=_PLAIN)}/{quote(path, safe=_PLAIN)}{'?' if query else ''}{query}"


def full_path(names: str, path: str = "") -> str:
    """A path that says of which namespace it is: a URL without its scheme, for programs that build a URL from both.

    A name of the TOML file stands behind an @ here, so that it is not the first folder of a path. Only what a URL gives
    another meaning is written as %25 and %3F, and brackets of addresses as %5B and %5D, which are no pattern then.
    """
    where = quote(names if _is_list(names) else f"@{names}", safe=_PLAIN.replace("[]", "").replace("*", ""))
    return f"{where}/{path.replace('%', '%25').replace('?', '%3F')}".rstrip("/")


def split_full_path(text: str) -> tuple[str, str]:
    """The counterpart of `full_path`."""
    names, path, _ = split_url(f"{SCHEME}://{text}")
    return names, path


def _bare(names: str) -> str:
    """Without the @ that `full_path` writes."""
    return names if _is_list(names) else names.removeprefix("@")


def _is_list(names: str) -> bool:
    """Whether these are addresses, and no name of the TOML file."""
    return "," in names or _ADDRESS.fullmatch(names) is not None


def says_namespace(path: str) -> bool:
    """Whether a path can be one of `full_path`."""
    first = path.partition("/")[0]
    return first.startswith("@") or _is_list(unquote(first))


def find(name: str) -> Config:
    """The namespace of a list of addresses, or of a name in the TOML file."""
    if _is_list(name):
        members = tuple(_member(url, {"url": url}) for url in name.split(",") if url)
        return _with_access(Config(name, members, _default(len(members))), {}, name)
    file = config_file()
    try:
        with file.open("rb") as opened:
            known = tomllib.load(opened).get("namespaces", {})
    except FileNotFoundError:
        raise InvalidArgument(
            f"ckpt://{name}: {name} is no list of host:port, and there is no {file} that could say what it is"
        ) from None
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise InvalidArgument(f"{file} can't be read: {error}") from error
    if name not in known:
        raise InvalidArgument(f"{file} has no [namespaces.{name}]; it has {', '.join(sorted(known)) or 'none'}")
    return from_table(name, known[name], f"{file}, [namespaces.{name}]")


def _near(config: Config, name: str, url: str) -> Config:
    """With first copies at one of the members, each of which is a host of its own."""
    if name not in [member.name for member in config.members] or any(member.spot.domain for member in config.members):
        raise InvalidArgument(f"{url}: near= names one of the nodes that the URL lists; for a name it is in the TOML file")
    members = tuple(replace(m, spot=replace(m.spot, domain=(m.name,))) for m in config.members)
    return replace(config, members=members, near=(name,))


def config_file() -> Path:
    """Where the TOML file is, or would be."""
    if given := os.environ.get("CKPT_CONFIG"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "ckpt" / "config.toml"


def from_table(name: str, table: Mapping[str, Any], where: str) -> Config:
    """A namespace from its part of a TOML file."""
    if unknown := set(table) - _KEYS:
        raise InvalidArgument(f"{where}: unknown key {sorted(unknown)[0]!r}; there are {', '.join(sorted(_KEYS))}")
    try:
        given, announced, access = table["members"], "", None
        if isinstance(given, str):
            announced, access = given, _etcd_access(where, table.get("etcd", {}))
            members, usual = _announced(where, given, access), parse("2x")  # not 1x because only one node has started yet
        else:
            members = tuple(_member(where, m if isinstance(m, dict) else {"url": m}) for m in given)
            usual = _default(len(members))
        redundancy = parse(table["redundancy"]) if "redundancy" in table else usual
        near = _domain(table.get("near", ""))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{where}: {error!r}; see the documentation of the namespace") from error
    return _with_access(Config(name, members, redundancy, near, announced=announced, etcd=access), table, where)


def is_address(name: str) -> bool:
    """Whether the name of a member says where it is: host:port."""
    return _ADDRESS.fullmatch(name) is not None


def check(config: Config) -> Config:
    """The configuration, if it makes sense."""
    names = [member.name for member in config.members]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise InvalidArgument(f"ckpt://{config.name}: the member {twice} is there twice")
    if config.redundancy.fragments > len(names):
        raise InvalidArgument(
            f"ckpt://{config.name}: redundancy {config.redundancy} needs {config.redundancy.fragments} members, "
            f"there are {len(names)}"
        )
    return config


def _default(members: int) -> Redundancy:
    """Two copies, where there are two members."""
    return parse("2x" if members > 1 else "1x")


def _member(where: str, given: Mapping[str, Any]) -> Member:
    if unknown := set(given) - _MEMBER_KEYS:
        raise InvalidArgument(f"{where}: unknown key {sorted(unknown)[0]!r} of a member; there are {', '.join(_MEMBER_KEYS)}")
    url = str(given["url"])
    weight = float(given.get("weight", 1.0))
    if not 0 <= weight < 1e9:
        raise InvalidArgument(f"{where}: the weight of {url} is {weight}; it must not be negative")
    name, domain = str(given.get("name", url)), _domain(given.get("domain", ""))
    address = url.removeprefix("node://")
    if _ADDRESS.fullmatch(address):
        return Member(Spot(given.get("name", address), domain, weight), address=address)
    if url.partition("://")[0] in OBJECT_SCHEMES:
        return Member(Spot(name, domain, weight), bucket=url)
    folder = url.removeprefix("file://") if url.startswith("file:///") else url
    if "://" in folder or not os.path.isabs(os.path.expanduser(folder)):
        raise InvalidArgument(
            f"{where}: {url!r} is no member: use host:port of a ckpt-node, the full path of a directory, or s3://bucket/folder"
        )
    return Member(Spot(name, domain, weight), folder=os.path.expanduser(folder))


_announced_before: dict[str, tuple[Member, ...]] = {}


def _etcd_access(where: str, table: Any) -> EtcdAccess:
    if not isinstance(table, dict) or table.keys() - etcd_access.VARIABLES.keys() or not all(map(_is_text, table.values())):
        raise InvalidArgument(f"{where}: etcd is {table!r}; it may have {', '.join(etcd_access.VARIABLES)}, each a text")
    return etcd_access.from_environment(table)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _announced(where: str, url: str, access: EtcdAccess) -> tuple[Member, ...]:
    """The members that etcd knows; while it does not answer, those that it told this process of before."""
    from ckpt.aggregator import etcd

    endpoints, cluster = etcd.parse_url(url)
    try:
        found = etcd.members(endpoints, cluster, access=access)
        if not found:
            raise Unavailable(f"{where}: no node has announced itself in {url}; start them with --etcd and --cluster {cluster}")
    except Unavailable as error:
        if url not in _announced_before:
            raise
        log.warning("go on with the members that were known before: %s", error)
        return _announced_before[url]
    tables = [{"url": m.facts.address, "name": m.name, "domain": m.facts.domain, "weight": m.facts.weight} for m in found]
    _announced_before[url] = tuple(_member(url, table) for table in tables)
    return _announced_before[url]


def _domain(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split("/") if part)


def _with_access(config: Config, table: Mapping[str, Any], where: str) -> Config:
    file = table.get("token_file")
    token = _read(file).decode().strip() if file else token_told()
    ca = table.get("ca_file") or os.environ.get("CKPT_CA_FILE")
    certificate = None
    if "cert_file" in table or "key_file" in table:
        certificate = (_read(table.get("cert_file", "")), _read(table.get("key_file", "")))
    given = table.get("deadline_seconds", Access().deadline_seconds)
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise InvalidArgument(f"{where}: deadline_seconds is {given!r}; it must be a number of seconds, such as 10.0")
    insecure = table.get("insecure", insecure_allowed())
    if not isinstance(insecure, bool):
        raise InvalidArgument(f"{where}: insecure is {insecure!r}; write true or false")
    return replace(config, access=Access(token, _read(ca) if ca else None, certificate, seconds, insecure))


def token_told() -> str | None:
    """The token that the environment names."""
    if token := os.environ.get("CKPT_TOKEN"):
        return token
    file = os.environ.get("CKPT_TOKEN_FILE")
    return _read(file).decode().strip() if file else None


def _read(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path} can't be read: {error.strerror}") from error
