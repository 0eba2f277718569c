"""The configuration of a namespace: its members and credentials, from a ckpt:// URL or from a TOML file.

    ckpt://host:port,host:port/path?redundancy=2x      nodes by address; &near=host:port names the node of this host
    ckpt://NAME/path                                   a namespace that is configured in a TOML file

The file is `$CKPT_CONFIG`, else `ckpt/config.toml` in the user's configuration folder. A member is a node, a directory of
this host or a bucket. Every key but `members` has a default:

    [namespaces.NAME]
    redundancy = "2x"               # of files that are written without a redundancy of their own
    near = "rack1/host1"            # the failure domains of this host: the first copy of a file is stored there
    token_file = "/etc/ckpt/token"  # default: $CKPT_TOKEN, or the file that $CKPT_TOKEN_FILE names
    ca_file = "/etc/ckpt/ca.pem"    # use TLS; add cert_file and key_file where nodes require client certificates
    deadline_seconds = 30.0         # of one call of a member
    insecure = false                # true, or $CKPT_INSECURE=1: send the token to other hosts without TLS
    members = [
        "host3:7070",
        { url = "host4:7070", domain = "rack2/host4", weight = 2.0 },
        { url = "/mnt/nvme0", name = "disk0" },
        { url = "s3://bucket/folder", domain = "cloud" },
    ]

Instead of the list, the members can be the nodes that announced themselves in etcd before the namespace was opened, whether
they are up or not:

    members = "etcd://host:2379,host:2379/CLUSTER"
    etcd = { ca_file = "/etc/ckpt/etcd-ca.pem" }    # default: the environment variables of etcd_access.py
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ckpt.aggregator.cluster import etcd_access
from ckpt.aggregator.cluster.config_values import number_or_nan, require_string
from ckpt.aggregator.cluster.etcd_access import EtcdCredentials
from ckpt.aggregator.placement.redundancy import Redundancy, parse_redundancy
from ckpt.aggregator.placement.rendezvous_hash import MAX_WEIGHT, MemberLocation
from ckpt.storage.base.errors import InvalidArgument, StoreError, Unavailable
from ckpt.storage.base.fd_io import describe_unreadable_file
from ckpt.storage.node.client_credentials import (
    ADDRESS_PATTERN,
    TOKEN_VARIABLE,
    NodeCredentials,
    is_insecure_allowed,
    require_valid_port,
)
from ckpt.storage.node.security_options import VARIABLES
from ckpt.storage.urls import OBJECT_SCHEMES

log = logging.getLogger("ckpt")

NAMESPACE_SCHEME = "ckpt"
_UNQUOTED = "/:,[]+=@*!"
"""Characters of a URL that are not quoted, besides letters, digits and _.-~."""
_MEMBER_KEYS = ("domain", "name", "url", "weight")
_NAMESPACE_KEYS = {
    "redundancy", "near", "token_file", "ca_file", "cert_file", "key_file", "deadline_seconds", "members", "insecure", "etcd",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """The configuration of one member. Exactly one of `address`, `folder` and `bucket` is set."""

    location: MemberLocation
    address: str | None = None
    """host:port of a node."""
    folder: str | None = None
    """The path of a directory of this host."""
    bucket: str | None = None
    """The URL of a folder in a bucket."""

    @property
    def name(self) -> str:
        return self.location.name


@dataclass(frozen=True, slots=True)
class NamespaceConfig:
    """The configuration of a namespace, as one client uses it."""

    name: str
    """The part of the URL between ckpt:// and the path, for messages and URLs."""
    members: tuple[Member, ...]
    redundancy: Redundancy
    host_domain: tuple[str, ...] = ()
    """The failure domains of this host, the widest first."""
    credentials: NodeCredentials = field(default_factory=NodeCredentials)
    etcd_url: str = ""
    """The URL of the etcd that lists the members; empty where the configuration lists them."""
    etcd_credentials: EtcdCredentials | None = None


def parse_namespace_url(url: str) -> tuple[NamespaceConfig, str]:
    """Return the configuration of the namespace of a URL, and the path in the namespace. Raises InvalidArgument."""
    names, path, options = split_url(url)
    if not names:
        raise InvalidArgument(f"{url}: write ckpt://host:port,host:port/path, or ckpt://NAME/path with NAME in a TOML file")
    config = find_config(names)
    if "near" in options:
        config = _with_host_domain(config, options["near"], url)
    if "redundancy" in options:
        config = replace(config, redundancy=parse_redundancy(options["redundancy"]))
    return check_config(config), path


def split_url(url: str) -> tuple[str, str, dict[str, str]]:
    """Return the members' part, the path and the options of a URL, each unquoted. Raises InvalidArgument."""
    # urlsplit refuses a list of addresses that contains brackets.
    scheme, _, rest = url.partition("://")
    if scheme != NAMESPACE_SCHEME:
        raise InvalidArgument(f"{url} is not a URL of a namespace; write {NAMESPACE_SCHEME}://host:port,host:port/path")
    location, _, query = rest.partition("?")
    names, _, path = location.partition("/")
    # parse_qs reads the + of 4+2 as a space.
    options = {key: unquote(value) for key, _, value in (item.partition("=") for item in query.split("&")) if key}
    if unknown := set(options) - {"redundancy", "near"}:
        raise InvalidArgument(f"{url}: unknown option {sorted(unknown)[0]!r}; use redundancy= or near=")
    if "\0" in (unquoted := unquote(names)):
        raise InvalidArgument(f"{url!r} has a zero byte in the names of the members; write {NAMESPACE_SCHEME}://host:port/path")
    return _strip_at(unquoted), unquote(path).strip("/"), options


def join_url(names: str, path: str = "", **options: str | None) -> str:
    """Return the URL of these parts: the inverse of `split_url`. Options without a value are left out."""
    query = "&".join(f"{key}={quote(value, safe=_UNQUOTED)}" for key, value in options.items() if value)
    return f"{NAMESPACE_SCHEME}://{quote(names, safe=_UNQUOTED)}/{quote(path, safe=_UNQUOTED)}{'?' if query else ''}{query}"


def full_path(names: str, path: str = "") -> str:
    """Return a path that contains its namespace: a URL without the scheme, for programs that add the scheme themselves.

    A name of the TOML file gets the prefix @, because it would otherwise look like the first folder of a path. In the path only
    % and ? are quoted, as %25 and %3F. Brackets of addresses are quoted as %5B and %5D, because they are a pattern to glob.
    """
    location = quote(names if _is_address_list(names) else f"@{names}", safe=_UNQUOTED.replace("[]", "").replace("*", ""))
    return f"{location}/{path.replace('%', '%25').replace('?', '%3F')}".rstrip("/")


def split_full_path(text: str) -> tuple[str, str]:
    """Return the members' part and the path of a full path: the inverse of `full_path`."""
    names, path, _ = split_url(f"{NAMESPACE_SCHEME}://{text}")
    return names, path


def _strip_at(names: str) -> str:
    """Return the name without the @ that `full_path` adds."""
    return names if _is_address_list(names) else names.removeprefix("@")


def _is_address_list(names: str) -> bool:
    """Return whether these are addresses and not a name of the TOML file."""
    return "," in names or ADDRESS_PATTERN.fullmatch(names) is not None


def is_full_path(path: str) -> bool:
    """Return whether a path can be a result of `full_path`."""
    first = path.partition("/")[0]
    return first.startswith("@") or _is_address_list(unquote(first))


def find_config(name: str) -> NamespaceConfig:
    """Return the configuration for a list of addresses, or for a name in the TOML file. Raises InvalidArgument."""
    if _is_address_list(name):
        members = tuple(_parse_member(f"{NAMESPACE_SCHEME}://{name}", {"url": url}) for url in name.split(",") if url)
        return _with_credentials(NamespaceConfig(name, members, _default_redundancy(len(members))), {}, name)
    file = config_file()
    try:
        tables = parse_tables(file.read_bytes(), file)
    except FileNotFoundError:
        raise InvalidArgument(
            f"ckpt://{name}: {name} is not a list of host:port, and {file} (CKPT_CONFIG) does not exist; write host:port, or "
            "define it in this file"
        ) from None
    except OSError as error:
        raise InvalidArgument(f"{file} can't be read: {describe_unreadable_file(error)} (CKPT_CONFIG)") from error
    if name not in tables:
        raise InvalidArgument(
            f"{file} has no [namespaces.{name}]; add it, or name one that it has ({', '.join(sorted(tables)) or 'none'})"
        )
    return config_from_table(name, tables[name], f"{file}, [namespaces.{name}]")


def parse_tables(data: bytes, file: Path) -> dict[str, Any]:
    """Return the tables of all namespaces in a TOML file, by name. Raises InvalidArgument.

    file: the path, for messages.
    """
    try:
        tables = tomllib.loads(data.decode()).get("namespaces", {})
    except (ValueError, RecursionError) as error:  # the errors of TOML and of UTF-8 are ValueErrors
        raise InvalidArgument(f"{file} can't be read ({error}); correct it") from error
    if not isinstance(tables, dict):
        raise InvalidArgument(f"{file}: namespaces is {tables!r}; write a table [namespaces.NAME]")
    return tables


def _with_host_domain(config: NamespaceConfig, node_name: str, url: str) -> NamespaceConfig:
    """Return the configuration with each member as a failure domain of its own, and `node_name` as the one of this host."""
    if node_name not in [member.name for member in config.members] or any(member.location.domain for member in config.members):
        raise InvalidArgument(
            f"{url}: near={node_name} is not one of the nodes that the URL lists; name one of them, or for a namespace of the "
            "TOML file set near there"
        )
    members = tuple(replace(m, location=replace(m.location, domain=(m.name,))) for m in config.members)
    return replace(config, members=members, host_domain=(node_name,))


def config_file() -> Path:
    """Return the path of the TOML file, which need not exist."""
    if given := os.environ.get("CKPT_CONFIG"):
        return Path(os.path.expanduser(given))
    return Path(os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config"), "ckpt", "config.toml")


def config_from_table(name: str, table: Mapping[str, Any], source: str) -> NamespaceConfig:
    """Return the configuration of a namespace from its table of a TOML file. Raises InvalidArgument.

    source: the file and the table, for messages.
    """
    if not isinstance(table, Mapping):
        raise InvalidArgument(f"{source} is {table!r}; write a table with members = [...]")
    if unknown := set(table) - _NAMESPACE_KEYS:
        raise InvalidArgument(f"{source}: unknown key {sorted(unknown)[0]!r}; use {', '.join(sorted(_NAMESPACE_KEYS))}")
    try:
        members_value, etcd_url, etcd_credentials = table["members"], "", None
        if isinstance(members_value, str):
            etcd_url, etcd_credentials = members_value, _parse_etcd_credentials(source, table.get("etcd", {}))
            members = _announced_members(source, members_value, etcd_credentials)
            default_redundancy = parse_redundancy("2x")  # not 1x, even while only one node has started
        else:
            members = tuple(_parse_member(source, m if isinstance(m, dict) else {"url": m}) for m in members_value)
            default_redundancy = _default_redundancy(len(members))
        has_redundancy = "redundancy" in table
        redundancy = parse_redundancy(require_string(table, "redundancy", source)) if has_redundancy else default_redundancy
        host_domain = _parse_domain(table, "near", source)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{source}: a value is missing or wrong ({error!r}); see docs/reference/namespace.md") from error
    return _with_credentials(
        NamespaceConfig(name, members, redundancy, host_domain, etcd_url=etcd_url, etcd_credentials=etcd_credentials),
        table,
        source,
    )


def is_address(name: str) -> bool:
    """Return whether the name of a member is an address: host:port."""
    return ADDRESS_PATTERN.fullmatch(name) is not None


def check_config(config: NamespaceConfig) -> NamespaceConfig:
    """Return the configuration unchanged. Raises InvalidArgument; Unavailable if etcd has too few members yet."""
    names = [member.name for member in config.members]
    if len(set(names)) < len(names):
        duplicate = next(n for n in names if names.count(n) > 1)
        raise InvalidArgument(f"ckpt://{config.name}: the member {duplicate} is listed twice; list it once")
    if config.redundancy.total_fragments > len(names):
        raise (Unavailable if config.etcd_url else InvalidArgument)(
            f"ckpt://{config.name}: redundancy {config.redundancy} needs {config.redundancy.total_fragments} members, "
            f"there are {len(names)}; add members or use less redundancy"
        )
    return config


def _default_redundancy(members: int) -> Redundancy:
    """Return 2x where there are two members or more, else 1x."""
    return parse_redundancy("2x" if members > 1 else "1x")


def _parse_member(source: str, table: Mapping[str, Any]) -> Member:
    if unknown := set(table).difference(_MEMBER_KEYS):
        raise InvalidArgument(f"{source}: unknown key {sorted(unknown)[0]!r} of a member; use {', '.join(_MEMBER_KEYS)}")
    url, given = require_string(table, "url", source), table.get("weight", 1.0)
    weight = number_or_nan(given)
    if not 0 <= weight < MAX_WEIGHT:
        raise InvalidArgument(f"{source}: the weight of {url} is {given!r}; it must be from 0 to below {MAX_WEIGHT:g}")
    address = url.removeprefix("node://")
    is_node = ADDRESS_PATTERN.fullmatch(address) is not None
    name = require_string(table, "name", source, address if is_node else url)
    domain = _parse_domain(table, "domain", source)
    if is_node:
        require_valid_port(address, source)
        return Member(MemberLocation(name, domain, weight), address=address)
    if url.partition("://")[0] in OBJECT_SCHEMES:
        return Member(MemberLocation(name, domain, weight), bucket=url)
    folder = url.removeprefix("file://") if url.startswith("file:///") else url
    if "://" in folder or not os.path.isabs(os.path.expanduser(folder)):
        raise InvalidArgument(
            f"{source}: {url!r} is not a member: use host:port of a ckpt-node, the full path of a directory, or s3://bucket/folder"
        )
    return Member(MemberLocation(name, domain, weight), folder=os.path.expanduser(folder))


_last_announced: dict[str, tuple[Member, ...]] = {}
"""The members that etcd listed last, by its URL. Threads replace whole entries, so it has no lock."""


def _parse_etcd_credentials(source: str, table: object) -> EtcdCredentials:
    if (
        not isinstance(table, dict)
        or table.keys() - etcd_access.ETCD_VARIABLES.keys()
        or not all(isinstance(value, str) for value in table.values())
    ):
        raise InvalidArgument(
            f"{source}: etcd is {table!r}; use a table of strings with {', '.join(etcd_access.ETCD_VARIABLES)}"
        )
    return etcd_access.etcd_credentials_from_environment(table)


def _announced_members(source: str, url: str, credentials: EtcdCredentials) -> tuple[Member, ...]:
    """Return the members that etcd lists, or those that it listed last in this process.

    The last ones count while it does not answer, refuses the login or lists none, and while a file of the credentials is
    unreadable. Raises the error where it has not listed any in this process.
    """
    from ckpt.aggregator.cluster import etcd

    endpoints, cluster = etcd.parse_etcd_url(url)
    try:
        found = etcd.list_members(endpoints, cluster, credentials=credentials)
        if not found:
            raise Unavailable(
                f"{source}: no node has announced itself in {url}; start nodes with --etcd and --cluster {cluster}"
            )
    except (StoreError, InvalidArgument) as error:
        if url not in _last_announced:
            raise
        log.warning("%s: using the members that etcd listed before: %s", source, error)
        return _last_announced[url]
    tables = [{"url": m.node.address, "name": m.name, "domain": m.node.domain, "weight": m.node.weight} for m in found]
    _last_announced[url] = tuple(_parse_member(url, table) for table in tables)
    return _last_announced[url]


def _parse_domain(table: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    return tuple(part for part in require_string(table, key, source, "").split("/") if part)


def _with_credentials(config: NamespaceConfig, table: Mapping[str, Any], source: str) -> NamespaceConfig:
    return replace(config, credentials=_parse_credentials(table, source))


def credentials_from_environment() -> NodeCredentials:
    """Return the credentials that the environment alone gives. Raises InvalidArgument if a file can't be read."""
    return _parse_credentials({}, "the environment")


def _parse_credentials(table: Mapping[str, Any], source: str) -> NodeCredentials:
    file, ca = table.get("token_file", ""), table.get("ca_file", "")
    token = token_from_environment() if file == "" else _read_token(file, f"{source}: token_file")
    ca_name = f"{source}: ca_file"
    if ca == "":
        ca, ca_name = os.environ.get(VARIABLES.authority, ""), VARIABLES.authority
    certificate = None
    if "cert_file" in table or "key_file" in table:
        chain, key = (_read_file(table.get(name, ""), f"{source}: {name}") for name in ("cert_file", "key_file"))
        certificate = (chain, key)
    given = table.get("deadline_seconds", NodeCredentials().deadline_seconds)
    seconds = number_or_nan(given)
    if not 0 < seconds < 1e6:
        raise InvalidArgument(f"{source}: deadline_seconds is {given!r}; it must be a number of seconds, such as 10.0")
    insecure = table.get("insecure", is_insecure_allowed())
    if not isinstance(insecure, bool):
        raise InvalidArgument(f"{source}: insecure is {insecure!r}; write true or false")
    return NodeCredentials(token, None if ca == "" else _read_file(ca, ca_name), certificate, seconds, insecure)


def token_from_environment() -> str | None:
    """Return the token that the environment gives, or None. Raises InvalidArgument if its file can't be read."""
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    file = os.environ.get(VARIABLES.token)
    return _read_token(file, VARIABLES.token) if file else None


def _read_token(path: object, name: str) -> str:
    try:
        return _read_file(path, name).decode().strip()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name} {path} can't be read: it is not text; write the token into it") from error


def _read_file(path: object, name: str) -> bytes:
    """Return the content of a file; raise InvalidArgument if it can't be read. name: the setting with its path."""
    if not isinstance(path, str):
        raise InvalidArgument(f"{name} {path!r} can't be read: write the path of a file as a string")
    try:
        return Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{name} {path} can't be read: {describe_unreadable_file(error)}") from error
