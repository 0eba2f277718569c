"""ckpt-node: serve one device to a namespace, and look after namespaces."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

import ckpt
from ckpt.storage.base.errors import InvalidArgument, StoreError
from ckpt.storage.base.plural import format_count
from ckpt.storage.node.credentials import TokenFile, is_loopback
from ckpt.tools import common
from ckpt.tools.common import emit, format_size

if TYPE_CHECKING:
    from ckpt.aggregator.cluster.etcd import Announcement
    from ckpt.aggregator.file_io.namespace import Namespace
    from ckpt.aggregator.maintenance.repair import RepairReport
    from ckpt.aggregator.maintenance.repair_leader import RepairLeader
    from ckpt.aggregator.maintenance.scrub import ScrubReport
    from ckpt.storage.node.server import NodeServer

log = logging.getLogger("ckpt.node")

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_END_SECONDS = 3.0
"""What the end of the server may take beyond the time for the calls under way."""
_MONITOR_OFFSET = 1000
"""From a node's port to that of its metrics: nodes on consecutive ports don't collide."""
_ANY_ADDRESSES = ("0.0.0.0", "[::]", "::")


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).upper().removesuffix("B")
        unit = text[-1:] if text[-1:] in _UNITS else ""
        try:
            number = float(text.removesuffix(unit)) * _UNITS[unit]
        except ValueError:
            self.fail(f"{value!r} is no size: write 500GB or 2TB", param, ctx)
        if not 1 <= number < 1 << 63:
            self.fail(f"{value!r} is no size: write 500GB or 2TB", param, ctx)
        return int(number)


_GRACE_OPTION = click.option(
    "--grace", default=3600.0, show_default=True, type=click.FloatRange(0), metavar="SECONDS",
    help="Leave objects alone that no record names and that are younger: somebody may be writing them.",
)  # fmt: skip
_RATE_OPTION = click.option("--rate", type=_Size(), metavar="SIZE", help="Write no more than this a second, such as 200MB.")


@click.group(
    "ckpt-node",
    invoke_without_command=True,
    context_settings=_SETTINGS,
    epilog="""\b
Examples:
  ckpt-node --data /mnt/nvme0                                  on this host alone, port 7070
  ckpt-node --data /mnt/nvme0 --listen 0.0.0.0:7070 --token-file token \\
            --tls-cert node.pem --tls-key node.key --domain rack=r1,host=h3
  ckpt-node --data /mnt/nvme0 --etcd http://host9:2379 --cluster lab   announced, see the documentation
  ckpt-node admin status ckpt://host1:7070,host2:7070,host3:7070

A client names the nodes: ckpt.save(state, "ckpt://host1:7070,host2:7070,host3:7070/run").
SIGTERM ends it once the writes under way are done.""",
)
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="The folder that is served; one disk, one node.")
@click.option("--listen", default="127.0.0.1:7070", show_default=True, metavar="HOST:PORT", help="Port 0 takes a free one.")
@click.option("--monitor", metavar="HOST:PORT", help="Health and metrics over HTTP; default: the same host, the port + 1000.")
@click.option("--domain", default="", metavar="KEY=VALUE,…", help="Failure domains, the widest first: rack=r1,host=h3.")
@click.option("--capacity", type=_Size(), help="Take no more than this, such as 2TB. Default: what the disk has.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="What clients must know.")
@click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Certificate chain, PEM.")
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Its key, PEM.")
@click.option("--tls-ca", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Ask clients for one of this CA.")
@click.option("--insecure", is_flag=True, help="Listen beyond this host without token or TLS.")
@click.option("--read-only", is_flag=True, help="Take no writes.")
@click.option("--no-near", is_flag=True, help="Let clients on this host, too, send every byte over the wire.")
@click.option("--etcd", metavar="URL,…", help="Announce this node in etcd while it serves: http://host:2379,http://…")
@click.option("--cluster", metavar="NAME", help="The cluster to announce it in. Goes with --etcd.")
@click.option("--advertise", metavar="HOST:PORT", help="Where clients reach it; its name. Default: --listen. Goes with --etcd.")
@click.option("--repair", "repairing", metavar="URL", help="Look after this namespace, when no other node does.")
@click.option(
    "--repair-every",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="How often it is looked through.",
)
@click.option("--repair-rate", type=_Size(), metavar="SIZE", help="Repairs write no more than this a second, such as 200MB.")
@click.option("--drain-seconds", default=30.0, show_default=True, type=click.FloatRange(0), help="SIGTERM waits so long.")
@click.version_option(ckpt.__version__, package_name="ckpt-store")
@click.pass_context
def command(
    context: click.Context, data: Path | None, listen: str, monitor: str | None, domain: str, capacity: int | None,
    token_file: Path | None, tls_cert: Path | None, tls_key: Path | None, tls_ca: Path | None, insecure: bool,
    read_only: bool, no_near: bool, etcd: str | None, cluster: str | None, advertise: str | None, repairing: str | None,
    repair_every: float, repair_rate: int | None, drain_seconds: float,
) -> int:  # fmt: skip
    """Serve the folder --data as one node, or (admin) look after a namespace of nodes."""
    if context.invoked_subcommand is not None:
        return 0
    if data is None:
        raise click.UsageError("--data is missing: the folder, on the disk that this node is to serve")
    host, port = _parse_address(listen, "--listen")
    if not is_loopback(host) and not insecure and (token_file is None or tls_cert is None):
        raise click.UsageError(
            f"--listen {listen} can be reached from other hosts: give --token-file, --tls-cert and --tls-key, or say --insecure"
        )
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    if tls_ca is not None and tls_cert is None:
        raise click.UsageError("--tls-ca asks clients for a certificate: the node needs --tls-cert and --tls-key itself")
    announcement_spec = _parse_announcement(etcd, cluster, advertise, host)

    from ckpt.storage.node.server import NodeOptions

    options = NodeOptions(
        tokens=_open_token_file(token_file),
        certificate=None if tls_cert is None or tls_key is None else _read_certificate(tls_cert, tls_key),
        client_ca=None if tls_ca is None else _read_authority(tls_ca),
        read_only=read_only,
        labels=_parse_labels(domain),
        pass_descriptors=not no_near,
    )
    monitor_address = _parse_address(monitor, "--monitor") if monitor else (host, _monitor_port(port))
    repair_settings = (repairing, repair_every, repair_rate) if repairing else None
    return _serve_node(
        data, capacity, (host, port), monitor_address, options, announcement_spec, repair_settings, drain_seconds
    )


def _monitor_port(port: int) -> int:
    """The default port of health and metrics; 0, any free one, where the node takes any."""
    if not port:
        return 0
    return port + _MONITOR_OFFSET if port + _MONITOR_OFFSET < 1 << 16 else port - _MONITOR_OFFSET


@dataclass(frozen=True, slots=True)
class _AnnouncementSpec:
    """Where a node is to be announced, and as what."""

    endpoints: tuple[str, ...]
    cluster: str
    advertise: str | None

    def announce(self, listen_address: str, labels: tuple[tuple[str, str], ...], identity: str) -> Announcement:
        """Announce a node that serves."""
        from ckpt.aggregator.cluster import etcd

        address = self.advertise or listen_address
        facts = etcd.AnnouncedNode(address, "/".join(value for _, value in labels), device=identity)
        return etcd.announce(self.endpoints, self.cluster, address, facts)


def _parse_announcement(
    endpoints: str | None, cluster: str | None, advertise: str | None, host: str
) -> _AnnouncementSpec | None:
    if endpoints is None:
        if cluster is not None or advertise is not None:
            raise click.UsageError("--cluster and --advertise go with --etcd: http://host:2379")
        return None

    from ckpt.aggregator.cluster import etcd

    if cluster is None:
        raise click.UsageError("--etcd needs --cluster NAME: the cluster that this node belongs to")
    if advertise is None and host in _ANY_ADDRESSES:
        raise click.UsageError(f"no client can reach {host}: give --advertise HOST:PORT, the address of this node")
    if advertise is not None and not _parse_address(advertise, "--advertise")[1]:
        raise click.UsageError(f"--advertise {advertise}: clients need the port too")
    try:
        etcd.check_address(advertise or f"{host}:0")
        return _AnnouncementSpec(etcd.parse_endpoints(endpoints), etcd.check_cluster(cluster), advertise)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error


class _OneLineFormatter(logging.Formatter):
    """A line an event, tracebacks and whatever clients say included."""

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(line.strip() for line in super().format(record).splitlines() if line.strip(" ^~"))


def _serve_node(
    data: Path, capacity: int | None, listen: tuple[str, int], monitor: tuple[str, int], options: object,
    announcement_spec: _AnnouncementSpec | None, repair_settings: tuple[str, float, int | None] | None, drain_seconds: float,
) -> int:  # fmt: skip
    from ckpt.storage.member.device import Device
    from ckpt.storage.node.metrics import MetricsServer
    from ckpt.storage.node.server import NodeOptions, NodeServer

    assert isinstance(options, NodeOptions)
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLineFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    device = Device(data, capacity)
    try:
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        with socket.create_server((listen[0].strip("[]"), listen[1]), family=family):
            pass  # gRPC's own error says less, in more lines
    except OSError as error:
        message = f"can't listen on {listen[0]}:{listen[1]}: {error.strerror or error}; choose another --listen"
        raise InvalidArgument(message) from error
    server = NodeServer(device, *listen, options)
    metrics_server: MetricsServer | None = None
    try:
        metrics_server = MetricsServer(server, monitor[0].strip("[]"), monitor[1])
    except OSError as error:  # a node without metrics serves as well
        log.warning("no health and metrics: can't listen on %s:%d: %s; choose another --monitor", *monitor, error.strerror)
    metrics = f"metrics at {monitor[0]}:{metrics_server.port}" if metrics_server else "no metrics"
    end_signals = (signal.SIGTERM, signal.SIGINT)
    signal_receiver, wake = socket.socketpair()  # no Event: a signal that comes just before its wait does not end that
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    for each in end_signals:
        signal.signal(each, lambda *_: None)
    if options.certificate is None and not is_loopback(listen[0]):
        log.warning("--insecure: anyone who reaches %s:%d reads and writes everything", listen[0], server.port)
    announced = (
        announcement_spec.announce(f"{listen[0]}:{server.port}", options.labels, server.identity) if announcement_spec else None
    )
    used, free = server.usage()
    log.info(
        "serving %s at %s:%d (%s), %s used, %s free, device %s",
        device.path, listen[0], server.port, metrics, format_size(used), format_size(free), server.identity[:8],
    )  # fmt: skip
    repair_leader = _start_repair_leader(server.identity, *repair_settings) if repair_settings else None
    while signal_receiver.recv(1)[0] not in end_signals:
        pass  # it serves since it was made; `serve` would only wait, and take the signals
    signal.set_wakeup_fd(-1)
    until = time.monotonic() + drain_seconds
    log.info("draining: %d uploads under way", len(server.uploads))
    ending = threading.Thread(
        target=_end_service, args=(server, repair_leader, announced, until), name="ckpt-node-end", daemon=True
    )
    ending.start()
    ending.join(max(0.0, until - time.monotonic()) + _END_SECONDS)
    stuck = ending.is_alive()
    if stuck:
        log.warning("calls under way were cut off: their clients did not let them end within %g s", drain_seconds)
    else:
        if metrics_server is not None:
            metrics_server.close()
        device.close()
    log.info("ended")
    if stuck:  # Flight has no other way out of a call, and waits for them at the end of the process, too
        logging.shutdown()
        os._exit(0)
    return 0


def _end_service(server: NodeServer, repair_leader: RepairLeader | None, announced: Announcement | None, until: float) -> None:
    """Let what is under way come to its end."""
    server.is_draining = True
    if announced is not None:
        announced.close()
    aborted = server.drain(max(0.0, until - time.monotonic()))
    if aborted:
        log.warning("%d uploads were thrown away: they were not done when the time for it was over", aborted)
    if repair_leader is not None:
        repair_leader.close(max(0.0, until - time.monotonic()))
    server.shutdown()


def _start_repair_leader(identity: str, url: str, every: float, rate: int | None) -> RepairLeader:
    from ckpt.aggregator.file_io.namespace import open_namespace
    from ckpt.aggregator.maintenance.repair_leader import RepairLeader

    return RepairLeader(open_namespace(url)[0], identity, every, rate)


def _open_token_file(file: Path | None) -> TokenFile | None:
    try:
        return None if file is None else TokenFile(file)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def _read_certificate(chain: Path, key: Path) -> tuple[bytes, bytes]:
    """What is in the files, once that is known to be of use: gRPC says only that the server did not start."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
    except OSError as error:
        what = f"--tls-cert {chain} with --tls-key {key}: {error.strerror or error}"
        message = f"{what}; give a chain and its key, PEM, not encrypted"
        raise InvalidArgument(message) from error
    return chain.read_bytes(), key.read_bytes()


def _read_authority(file: Path) -> bytes:
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except OSError as error:
        message = f"--tls-ca {file}: {error.strerror or error}; give the certificates of an authority, PEM"
        raise InvalidArgument(message) from error
    return file.read_bytes()


def _parse_address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or bare or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"{option} {text}: write HOST:PORT, such as 127.0.0.1:7070 or [::1]:7070")
    return host, int(port)


def _parse_labels(text: str) -> tuple[tuple[str, str], ...]:
    found = []
    for item in filter(None, text.split(",")):
        key, separator, value = item.partition("=")
        if not separator or not key or not value:
            raise click.UsageError(f"--domain {text}: write KEY=VALUE pairs, the widest domain first: rack=r1,host=h3")
        found.append((key, value))
    return tuple(found)


# --- admin -----------------------------------------------------------------------------------------------------


@command.group("admin", context_settings=_SETTINGS)
def admin() -> None:
    """Look after a namespace: ckpt-node admin COMMAND ckpt://…"""


@admin.command("status", context_settings=_SETTINGS)
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(url: str, as_json: bool) -> int:
    """Show the members of a namespace and whether they answer.

    Exit status: 0 all members answer, 1 some do not.
    """
    from ckpt.aggregator.cluster.member_facts import domain_of_labels
    from ckpt.aggregator.file_io.namespace import open_namespace

    namespace, _ = open_namespace(url)
    calls = {name: open_member.info for name, open_member in namespace.open_members.items()}
    answers, errors = namespace.fan_out.ask(calls, namespace.config.credentials.deadline_seconds)
    domains = {
        n: "/".join(place.member.location.domain or domain_of_labels(answers.get(n)))
        for n, place in namespace.open_members.items()
    }
    if as_json:
        members = [
            {"member": n, "state": answers[n].state, "used_bytes": answers[n].used_bytes, "free_bytes": answers[n].free_bytes,
             "domain": domains[n]}
            if n in answers else {"member": n, "state": "down", "error": str(errors[n]), "domain": domains[n]}
            for n in namespace.open_members
        ]  # fmt: skip
        common.emit_json({"url": namespace.url, "redundancy": str(namespace.config.redundancy), "members": members})
        return int(bool(errors))
    rows = []
    for name, domain in domains.items():
        if name in answers:
            info = answers[name]
            used, free = ("" if n is None else format_size(n) for n in (info.used_bytes, info.free_bytes))
            rows.append((name, info.state, used, free, domain))
        else:
            rows.append((name, "down", "", "", domain))
    common.show_table(("member", "state", ">used", ">free", "domain"), rows)
    for name, error in errors.items():
        emit(f"{name}: {error}")
    emit(
        f"{len(answers)} of {len(namespace.open_members)} members answer; new files are written as "
        f"{namespace.config.redundancy}"
    )
    return int(bool(errors))


@admin.command("scrub", context_settings=_SETTINGS)
@click.argument("url")
@click.option("--quick", is_flag=True, help="Only compare lists; read nothing.")
@_GRACE_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def scrub(url: str, quick: bool, grace: float, as_json: bool) -> int:
    """Let all members read and check what they hold, and say what is missing, rotten or forgotten. Changes nothing.

    Exit status: 0 all is whole, 1 something is not.
    """
    from ckpt.aggregator.file_io.namespace import open_namespace

    namespace, _ = open_namespace(url)
    found = _run_scrub(namespace, not quick, grace)
    if as_json:
        common.emit_json(
            {
                "url": namespace.url,
                "files": found.files,
                "bytes": found.nbytes,
                "whole": found.is_whole,
                "damaged": [{"path": f.path, "state": f.state, "spare": f.spare_fragments} for f in found.damaged_files],
                "orphans": found.orphans,
                "lagging": found.lagging_paths,
                "missing": {m: str(e) for m, e in found.missing_members.items()},
                "unread_bytes": found.unchecked_bytes,
                "exposed": None if found.insufficient_redundancy is None else str(found.insufficient_redundancy),
            }
        )
        return int(not found.is_whole)
    _print_findings(namespace, found)
    return int(not found.is_whole)


@admin.command("repair", context_settings=_SETTINGS)
@click.argument("url")
@click.option("--quick", is_flag=True, help="Repair what lists show to be missing; read nothing to find rot.")
@_GRACE_OPTION
@_RATE_OPTION
def repair(url: str, quick: bool, grace: float, rate: int | None) -> int:
    """Make whole what a scrub finds, the most endangered files first. Can be cut off and run again.

    Exit status: 0 all is whole, 1 something could not be made so.
    """
    from ckpt.aggregator.file_io.namespace import open_namespace
    from ckpt.aggregator.maintenance import repair as repairs

    namespace, _ = open_namespace(url)
    found = _run_scrub(namespace, not quick, grace)
    _print_findings(namespace, found)
    total = sum(f.file.head.nbytes for f in found.damaged_files if f.state != "lost")
    with common.progress(total, "repairing") as advance:
        done = repairs.repair_namespace(namespace, found, rate, advance)
    is_left = bool(done.failed or found.missing_members)
    now = "not all whole yet" if is_left else "nothing is missing now" if quick else "all whole now"
    emit(
        f"{format_count(done.files, 'file')} made whole ({format_size(done.nbytes)} written), "
        f"{format_count(done.records, 'record')} brought "
        f"up to date, {format_count(done.orphans, 'forgotten object')} deleted; {now}"
    )
    for path, why in done.failed.items():
        emit(f"{path}: {why}")
    return int(is_left)


@admin.command("drain", context_settings=_SETTINGS)
@click.argument("url")
@click.argument("member")
@_RATE_OPTION
def drain(url: str, member: str, rate: int | None) -> int:
    """Move all that lies on MEMBER to the others, before its disk goes. Give it the weight 0 in the TOML file first.

    It still keeps records: `forget` it before it goes for ever.
    """
    from ckpt.aggregator.file_io.namespace import open_namespace
    from ckpt.aggregator.maintenance import rebalance

    namespace, _ = open_namespace(url)
    with common.progress(_member_used_bytes(namespace, member), "moving") as advance:
        status = _print_moved(rebalance.drain_member(namespace, member, _limit_rate(advance, rate)))
    if any(spot.name == member and spot.weight > 0 for spot in namespace.locations):
        emit(f"new files still go to {member}: give it the weight 0 in the TOML file and drain it again, or `forget` it")
    return status


@admin.command("rebalance", context_settings=_SETTINGS)
@click.argument("url")
@_RATE_OPTION
def rebalance(url: str, rate: int | None) -> int:
    """Move files to where they would be written today: onto members that are new, or were away. New ones keep records, too."""
    from ckpt.aggregator.file_io.namespace import open_namespace
    from ckpt.aggregator.maintenance import rebalance

    namespace, _ = open_namespace(url)
    with common.growing_progress("moving") as (expect, advance):
        return _print_moved(rebalance.rebalance_fragments(namespace, _limit_rate(advance, rate), expect))


@admin.command("forget", context_settings=_SETTINGS)
@click.argument("url")
@click.argument("member")
@click.option("--destroyed", is_flag=True, help="It never comes back: go on even if, of two members, one alone is left.")
@_RATE_OPTION
def forget(url: str, member: str, destroyed: bool, rate: int | None) -> int:
    """Take MEMBER out for ever, whether it answers or is lost: what it holds and keeps goes to the others.

    URL still names it, and a new one in its place if there is one. Clients go on meanwhile; change their URLs after that.
    """
    from ckpt.aggregator.file_io.namespace import open_namespace
    from ckpt.aggregator.maintenance import rebalance

    namespace, _ = open_namespace(url)
    with common.progress(_member_used_bytes(namespace, member), "moving") as advance:
        done = rebalance.remove_member(namespace, member, destroyed, _limit_rate(advance, rate))
    status = _print_moved(done)
    if not status:
        emit(f"{member} is forgotten: stop it, and take it out of the URLs")
        emit(f"records are kept by {', '.join(namespace.ring.all_members)}")
    return status


def _member_used_bytes(namespace: Namespace, member: str) -> int | None:
    """The bytes on a member; None where it does not say."""
    try:
        return namespace.open_members[member].info().used_bytes if member in namespace.open_members else None
    except StoreError:
        return None


def _limit_rate(advance: common.Advance, rate: int | None) -> common.Advance:
    """What holds up whoever writes more than `rate` bytes a second."""
    from ckpt.aggregator.maintenance.repair import ByteRateLimiter

    pace = ByteRateLimiter(rate)

    def paced(nbytes: int) -> None:
        advance(nbytes)
        pace(nbytes)

    return paced


def _print_moved(done: RepairReport) -> int:
    emit(f"{format_count(done.files, 'file')} moved, {format_size(done.nbytes)}")
    for path, why in done.failed.items():
        emit(f"{path}: {why}")
    return int(bool(done.failed))


def _run_scrub(namespace: Namespace, verify: bool, grace: float) -> ScrubReport:
    from ckpt.aggregator.maintenance.scrub import scrub_namespace

    if not verify:
        return scrub_namespace(namespace, grace_seconds=grace)
    total = sum(h.nbytes for h in namespace.list().values()) * namespace.config.redundancy.overhead
    with common.progress(int(total), "checking") as advance:
        return scrub_namespace(namespace, True, advance, grace)


def _print_findings(namespace: Namespace, found: ScrubReport) -> None:
    for health in found.damaged_files:
        consequence = (
            "it can't be read" if health.state == "lost" else f"{health.spare_fragments} more of its fragments may be lost"
        )
        emit(f"{health.path}: {health.state}, {consequence}" + "".join(f"; {m} is rotten" for m, _ in health.damaged_objects))
    for member, names in found.orphans.items():
        emit(f"{member}: {format_count(len(names), 'object')} that no record names")
    if found.lagging_paths:
        emit(f"{format_count(len(found.lagging_paths), 'record')} not the same on all members that keep them")
    for member, error in found.missing_members.items():
        emit(f"{member} is missing: {error}")
    if found.insufficient_redundancy:
        emit(
            f"records outlive fewer members than {found.insufficient_redundancy} says: repair, or name more members and "
            "rebalance"
        )
    if found.unchecked_bytes:
        emit(f"{format_size(found.unchecked_bytes)} could not be checked")
    whole = "all whole" if found.is_whole else "not all whole"
    emit(f"{format_count(found.files, 'file')}, {format_size(found.nbytes)} in {namespace.url}: {whole}")


def main() -> None:
    """The console script."""
    common.run(command)


if __name__ == "__main__":
    main()
