"""The command ckpt-node: serves one device to a namespace, and administers namespaces (`ckpt-node admin`)."""

from __future__ import annotations

from contextlib import suppress

import click

import ckpt
from ckpt.storage.base.errors import InvalidArgument, Unavailable
from ckpt.storage.node.client_credentials import is_loopback
from ckpt.tools import common
from ckpt.tools.node_admin import admin
from ckpt.tools.node_announcement import parse_announcement
from ckpt.tools.node_arguments import (
    monitor_port,
    open_token_file,
    parse_address,
    parse_labels,
)
from ckpt.tools.node_options import (
    NODE_SETTINGS,
    AccessOptions,
    AnnouncementOptions,
    RepairOptions,
    ServiceOptions,
    node_options,
)
from ckpt.tools.node_service import RepairSpec, ServiceSpec, serve_node


@click.group(
    "ckpt-node",
    invoke_without_command=True,
    context_settings=NODE_SETTINGS,
    epilog="""\b
Examples:
  ckpt-node --data /mnt/nvme0                                  on this host alone, port 7070
  ckpt-node --data /mnt/nvme0 --listen 0.0.0.0:7070 --token-file token \\
            --tls-cert node.pem --tls-key node.key --domain rack=r1,host=h3
  ckpt-node --data /mnt/nvme0 --etcd http://host9:2379 --cluster lab   announced in etcd, see the documentation
  ckpt-node admin status ckpt://host1:7070,host2:7070,host3:7070

A client names the nodes: ckpt.save(state, "ckpt://host1:7070,host2:7070,host3:7070/run").
After SIGTERM, the node waits for the running writes, and then ends.""",
)
@node_options
@click.version_option(ckpt.__version__, package_name="ckpt-store")
@click.pass_context
def command(
    context: click.Context,
    service: ServiceOptions,
    access: AccessOptions,
    announcement: AnnouncementOptions,
    repair: RepairOptions,
) -> int:
    """Serve the folder --data as one node, or administer a namespace of nodes (admin)."""
    if context.invoked_subcommand is not None:
        return 0
    return serve_node(_service_spec(service, access, announcement, repair))


def _service_spec(
    service: ServiceOptions, access: AccessOptions, announcement: AnnouncementOptions, repair: RepairOptions
) -> ServiceSpec:
    """Return what to serve; raise UsageError for options, or files that they name, that can't be used."""
    if service.data is None:
        raise click.UsageError("--data is missing: give the folder to serve, on the disk of this node")
    host, port = parse_address(service.listen, "--listen")
    _check_access(service.listen, host, access)
    announcement_spec = parse_announcement(announcement, host)
    if repair.repairing:
        _check_namespace_url(repair.repairing)

    from ckpt.storage.node.security_options import read_authority, read_certificate
    from ckpt.storage.node.server import NodeOptions

    options = NodeOptions(
        tokens=open_token_file(access.token_file),
        certificate=(
            None if access.tls_cert is None or access.tls_key is None else read_certificate(access.tls_cert, access.tls_key)
        ),
        client_ca=None if access.tls_ca is None else read_authority(access.tls_ca),
        read_only=service.read_only,
        labels=parse_labels(service.domain),
        pass_descriptors=not (service.no_fd_passing or service.no_near),
    )
    return ServiceSpec(
        data=service.data,
        capacity=service.capacity,
        listen=(host, port),
        monitor=parse_address(service.monitor, "--monitor") if service.monitor else (host, monitor_port(port)),
        options=options,
        announcement=announcement_spec,
        repair=RepairSpec(repair.repairing, repair.repair_every, repair.repair_rate) if repair.repairing else None,
        drain_seconds=service.drain_seconds,
    )


def _check_namespace_url(url: str) -> None:
    """Raise UsageError if --repair names no namespace. Its members need not answer, or be announced, before the node serves."""
    from ckpt.aggregator.cluster.config import parse_namespace_url

    try:
        with suppress(Unavailable):
            parse_namespace_url(url)
    except InvalidArgument as error:
        raise click.UsageError(f"--repair {url}: {error}") from error


def _check_access(listen: str, host: str, access: AccessOptions) -> None:
    """Raise UsageError if other hosts could reach the node without --insecure, or if TLS options don't fit together."""
    if not is_loopback(host) and not access.insecure and (access.token_file is None or access.tls_cert is None):
        raise click.UsageError(
            f"--listen {listen} can be reached from other hosts: give --token-file, --tls-cert and --tls-key, or --insecure"
        )
    if (access.tls_cert is None) != (access.tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key must be given together")
    if access.tls_ca is not None and access.tls_cert is None:
        raise click.UsageError("--tls-ca requires certificates of clients: the node also needs --tls-cert and --tls-key")


command.add_command(admin)


def main() -> None:
    """Run the command as a console script."""
    common.run(command)


if __name__ == "__main__":
    main()
