"""ckpt-run: keeps a training job running."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt.recovery.ranks import host_identity
from ckpt.storage.base.errors import CkptError, InvalidArgument
from ckpt.storage.base.plural import format_count
from ckpt.tools import common, run_queries
from ckpt.tools.simulate import command as simulate

if TYPE_CHECKING:
    from ckpt.recovery.memory_tier.memory_nodes import NodeSecurity

_FILE_TYPE = click.Path(exists=True, dir_okay=False, resolve_path=True)


@click.command("ckpt-run", context_settings=run_queries.SETTINGS | {"ignore_unknown_options": False})
@click.option("-n", "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes on each host.")
@click.option("--nnodes", type=click.IntRange(1), help="Hosts; start it on each. More wait as spares.  [default: 1]")
@click.option("--min", "least", type=click.IntRange(1), help="Go on with so many hosts, if need be.  [default: all]")
@click.option(
    "--spares",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="So many more hosts are expected to wait, and it is said when there are fewer.",
)
@run_queries.state_option
@click.option("--dir", "directory", metavar="URL", help="Where ranks save that name no URL: ckpt.Checkpointer(), CKPT_DIR.")
@run_queries.folder_option
@click.option(
    "--launcher",
    type=click.Choice(host_identity.LAUNCHERS),
    default="local",
    show_default=True,
    help="mpiexec: starts the ranks. Others start this command on each host: its name is theirs, and but for k8s --nnodes.",
)
@click.option("--name", help="Of this host.  [default: as the launcher or the system calls it]")
@click.option("--address", help="Where other hosts reach this one.  [default: the one that reaches the state]")
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Restarts in a row without a newer step.",
)
@click.option(
    "--grace",
    type=common.Number(0),
    default=30.0,
    show_default=True,
    help="Seconds to save in, after SIGTERM.",
)
@click.option(
    "--patience",
    type=common.Number(0, never=True),
    default=30.0,
    show_default=True,
    help="Seconds to wait for a host in place of a lost one, before going on with fewer.",
)
@click.option(
    "--give-up",
    type=common.Number(0, never=True),
    default=600.0,
    show_default=True,
    help="Seconds to wait for too few hosts, and for all of them at first.",
)
@click.option(
    "--hang",
    type=common.Number(1, never=True),
    default=10.0,
    show_default=True,
    help="Least seconds of silence that are a hang, in a step; elsewhere, as in a save, 30 times as many.",
)
@click.option(
    "--first-hang",
    type=common.Number(1, never=True),
    help="Most seconds of silence, in any phase, and as long as little is learned of it.  [default: 900 in a step]",
)
@click.option(
    "--spike",
    type=common.Number(0, min_open=True),
    metavar="FACTOR",
    help="A loss that is so many times the usual spread above the usual is a failure; 10 is a good value. Off unless given.",
)
@click.option(
    "--straggler",
    type=common.Number(1, min_open=True),
    metavar="FACTOR",
    help="Go on without a host that has a rank FACTOR times as slow as the median, where a spare waits; else it is only said.",
)
@click.option(
    "--straggler-after",
    type=common.Number(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that a rank must have been slow.",
)
@click.option("--again", is_flag=True, help="Begin anew where the run on several hosts has come to its end.")
@click.option(
    "--warm/--cold",
    default=True,
    show_default=True,
    help="Keep a process that has imported what ranks import, to fork them.",
)
@click.option(
    "--memory/--no-memory",
    default=True,
    show_default=True,
    help="Hosts keep memory for Tier('memory'), a copy of everything on two of them.",
)
@click.option(
    "--token-file",
    type=_FILE_TYPE,
    help="The job's secret, the same on all hosts: signs its log in etcd.  [default: $CKPT_TOKEN, $CKPT_TOKEN_FILE]",
)
@click.option("--tls-cert", type=_FILE_TYPE, help="The certificate chain of this host, PEM.")
@click.option("--tls-key", type=_FILE_TYPE, help="Its key, PEM.")
@click.option("--ca-file", type=_FILE_TYPE, help="The authority of the certificates of all hosts.  [default: $CKPT_CA_FILE]")
@click.option("--insecure", is_flag=True, help="Let other hosts reach the memory of this one without token or TLS.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve Prometheus' metrics there, at /metrics.")
@click.option("--show", type=click.Choice(["0", "all", "none"]), default="0", show_default=True, help="Whose output to show.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    ranks: int, nnodes: int | None, least: int | None, spares: int, state: str | None, directory: str | None, run_dir: Path,
    launcher: str, name: str | None, address: str | None, restarts: int, grace: float, patience: float, give_up: float,
    hang: float, first_hang: float | None, spike: float | None, straggler: float | None, straggler_after: float, again: bool,
    warm: bool, memory: bool, token_file: str | None, tls_cert: str | None, tls_key: str | None, ca_file: str | None,
    insecure: bool, metrics: str | None, show: str, command: tuple[str, ...],
) -> int:  # fmt: skip
    """Run COMMAND as so many ranks, and start them again from what they saved when one of them fails.

    \b
      ckpt-run -n 4 -- python train.py --lr 1e-4
      ckpt-run -n 8 --nnodes 4 --min 3 --state etcd://host0:2379/lab -- python train.py     on each host

    Other commands, each with --help:

    \b
      ckpt-run status                what hosts and ranks do now
      ckpt-run why                   what was decided, and why
      ckpt-run plan --fail 2         what would be decided if that happened now
      ckpt-run drain                 save, and end
      ckpt-run inject kill --rank 2  do something bad to a rank, to see what happens
      ckpt-run report                where the time went
      ckpt-run simulate              what failures cost, and how often to save

    A rank is told who it is as by torchrun (RANK, WORLD_SIZE, MASTER_ADDR …). A rank that uses ckpt.Checkpointer is
    noticed when it hangs, too, and is asked to save before the job ends. Exit status: 0 all ranks ended well, 1 the job was
    given up, 128 + n it was ended by signal n.
    """
    from ckpt.recovery.agent.agent import Agent, HostOptions
    from ckpt.recovery.policy.hang_limits import INITIAL_LIMIT_SECONDS, HangLimits, uniform_initial_limits
    from ckpt.recovery.run_log.base import open_run_log
    from ckpt.recovery.run_log.run_state import RunSpec
    from ckpt.repository.repository import DIRECTORY_VARIABLE
    from ckpt.training.loss_spikes import FACTOR_VARIABLE

    if spike is not None:
        os.environ[FACTOR_VARIABLE] = str(spike)  # the ranks inherit it

    _set_credentials(token_file, ca_file, insecure)
    hosts = nnodes or (host_identity.host_count(launcher, os.environ) or 1) - spares
    if spares and hosts < 2:
        raise InvalidArgument(
            f"--spares {spares} is of hosts, beside --nnodes 2 or more; one host has a process ready for warm starts without it"
        )
    if least is not None and least > hosts:
        raise InvalidArgument(f"--min {least} is more than the {format_count(hosts, 'host')} of --nnodes")
    if launcher == "mpiexec" and hosts > 1:
        raise InvalidArgument("--launcher mpiexec starts the ranks of one host; leave out --nnodes")
    if launcher in ("slurm", "torchrun", "k8s") and hosts > 1 and state is None:
        raise InvalidArgument(
            f"{hosts} hosts share no file that could hold the state of the run; give --state etcd://HOST:PORT/NAME"
        )
    if not command[0].strip():
        raise InvalidArgument("the command is empty, as a variable that is not set; write ckpt-run -- python train.py")
    _require_startable(command)
    if hint := host_identity.launcher_hint(launcher, command):
        common.print_error("ckpt-run", hint)
    if directory is not None:
        os.environ[DIRECTORY_VARIABLE] = directory = _usable_url(directory)  # the ranks inherit it
    name = host_identity.check_host_name(name or host_identity.host_name(launcher, os.environ))
    if nnodes is None:
        host_identity.require_host_count(launcher, os.environ)
    lock, name = (host_identity.lock_run(run_dir), name) if hosts == 1 else host_identity.lock_host_name(run_dir, name)
    limits = HangLimits(
        least_seconds=hang,
        initial_limit_seconds=INITIAL_LIMIT_SECONDS if first_hang is None else uniform_initial_limits(first_hang),
    )
    address = (address or "").strip("[]") or host_identity.host_address(state if hosts > 1 else None)
    security = _node_security(address, tls_cert, tls_key, insecure) if memory and hosts > 1 else None
    host_options = HostOptions(
        name, run_dir, address, limits, show, warm, _parse_metrics_address(metrics), launcher == "mpiexec", again, security
    )
    spec = RunSpec(
        command, ranks, hosts, least or hosts, restarts, grace, patience, give_up, spares, straggler or 0.0, straggler_after,
        directory or "",
    )  # fmt: skip
    opened = open_run_log(run_dir, state)
    try:
        return Agent(spec, host_options, opened, lambda text: common.print_error("ckpt-run", text)).run()
    finally:
        opened.close()
        os.close(lock)


def _require_startable(command: Sequence[str]) -> None:
    """Refuse a command that can't be started: it may be meant for what is asked of a run."""
    from ckpt.recovery.ranks import launch

    try:
        launch.require_startable(command)
    except CkptError as error:
        if near := get_close_matches(command[0], _SUBCOMMANDS, 1):
            raise CkptError(f"there is no command {command[0]}; did you mean `ckpt-run {near[0]}`?") from error
        raise


def _usable_url(url: str) -> str:
    """A URL that steps can be saved to, whatever folder it is seen from."""
    from ckpt.repository.repository import open_repository

    if not url:
        raise InvalidArgument("--dir names nothing, as a variable that is not set; give a folder or a URL, or leave it out")
    url = url if "://" in url else os.path.abspath(os.path.expanduser(url))
    try:
        open_repository(url).ensure()
    except CkptError as error:
        raise CkptError(f"--dir can't be used: {error}") from error
    return url


def _set_credentials(token_file: str | None, ca_file: str | None, insecure: bool) -> None:
    """For this process and the ranks, which inherit it."""
    variables = {"CKPT_TOKEN_FILE": token_file, "CKPT_CA_FILE": ca_file, "CKPT_INSECURE": "1" if insecure else None}
    os.environ.update({variable: value for variable, value in variables.items() if value})
    if token_file:
        os.environ.pop("CKPT_TOKEN", None)


def _node_security(address: str, tls_cert: str | None, tls_key: str | None, insecure: bool) -> NodeSecurity | None:
    """For the memory of this host, which others are to reach; None, and a line that says why, where they could not be told from
    strangers."""
    from ckpt.recovery.memory_tier.memory_nodes import NodeSecurity
    from ckpt.storage.node.credentials import is_loopback

    has_token = bool(os.environ.get("CKPT_TOKEN") or os.environ.get("CKPT_TOKEN_FILE"))
    security = NodeSecurity(has_token, tls_cert or "", tls_key or "", os.environ.get("CKPT_CA_FILE", ""), insecure)
    if lacks := security.missing_options(address):
        common.print_error(
            "ckpt-run", f"no memory is kept for Tier('memory'), as others would reach it at {address}: give {lacks}, or say "
            "--insecure or --no-memory",
        )  # fmt: skip
        return None
    if insecure and not is_loopback(address):
        common.print_error("ckpt-run", f"--insecure: anyone who reaches {address} can read and write the memory of this job")
    return security


def _parse_metrics_address(address: str | None) -> tuple[str, int] | None:
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")
        usable = bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    except UnicodeError:
        usable = False
    if not usable:
        raise InvalidArgument(f"--metrics {address}: write HOST:PORT, such as 127.0.0.1:9200")
    return host.strip("[]"), int(port)


_SUBCOMMANDS = {
    "why": run_queries.why,
    "status": run_queries.status,
    "report": run_queries.report,
    "inject": run_queries.inject,
    "drain": run_queries.drain,
    "plan": run_queries.plan,
    "simulate": simulate,
}


def main() -> None:
    """The console script."""
    if len(sys.argv) > 1 and sys.argv[1] in _SUBCOMMANDS:
        common.run(_SUBCOMMANDS[sys.argv.pop(1)])
    common.run(command)


if __name__ == "__main__":
    main()
