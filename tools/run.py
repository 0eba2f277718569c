"""The command ckpt-run: runs a training job, and restarts it from its last checkpoint after a failure."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt.recovery.ranks import host_identity, mpi
from ckpt.storage.base.background_stderr import write_stderr_in_background
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.plural import format_count
from ckpt.storage.node.client_credentials import INSECURE_VARIABLE, MAX_PORT, TOKEN_VARIABLE, is_loopback
from ckpt.tools import common, run_adapt, run_queries
from ckpt.tools.run_options import HostRunOptions, JobOptions, SecurityOptions, run_options
from ckpt.tools.simulate import command as simulate

if TYPE_CHECKING:
    from ckpt.storage.node.security_options import NodeSecurity


@click.command("ckpt-run", context_settings=run_queries.HELP_SETTINGS | {"ignore_unknown_options": False})
@run_options
def command(state: str | None, adapt: str, job: JobOptions, host: HostRunOptions, security: SecurityOptions) -> int:
    """Run COMMAND as a number of ranks, and restart them from their last checkpoint if one of them fails.

    \b
      ckpt-run -n 4 -- python train.py --lr 1e-4
      ckpt-run -n 8 --nnodes 4 --min 3 --state etcd://host0:2379/lab -- python train.py     on each host

    Other commands, each with --help:

    \b
      ckpt-run status                what hosts and ranks do now
      ckpt-run why                   what was decided, and why
      ckpt-run plan --fail 2         what would be decided if rank 2 failed now
      ckpt-run drain                 save, and end
      ckpt-run inject kill --rank 2  make a rank fail, to see what happens
      ckpt-run report                where the time went
      ckpt-run simulate              what failures cost, and how often to save

    Ranks get the environment variables of torchrun (RANK, WORLD_SIZE, MASTER_ADDR …). If a rank uses ckpt.Checkpointer,
    ckpt-run also notices when it hangs, and lets it save before the job ends. Exit status: 0 all ranks
    succeeded, or `ckpt-run drain` ended the job, 1 it was given up, 128 + n signal n ended it.
    """
    from ckpt.recovery.agent.agent import Agent
    from ckpt.recovery.agent.host_options import HostOptions
    from ckpt.recovery.run_log.base import open_run_log

    _require_linux()
    _check_name(host.name)
    _set_rank_environment(job, host.launcher, security)
    hosts = job.host_count(host.launcher, os.environ)
    _check_hosts(job, host.launcher, hosts, state)
    _check_command(job.command, host.launcher)
    name, address = _host_name_and_address(job, host, state if hosts > 1 else None)
    limits, metrics = host.hang_limits(), _parse_metrics_address(host.metrics)
    memory_security = _node_security(address, security) if host.memory and hosts > 1 else None
    with contextlib.ExitStack() as closing:
        etcd_log = None if state is None else closing.enter_context(contextlib.closing(open_run_log(host.run_dir, state)))
        # Up to here, nothing is written, so that a refused option leaves no file.
        directory = _adapted_directory(adapt, job, host, hosts)
        lock, name = (
            (host_identity.lock_run(host.run_dir), name) if hosts == 1 else host_identity.lock_host_name(host.run_dir, name)
        )
        closing.callback(os.close, lock)
        host_options = HostOptions(
            name=name,
            folder=host.run_dir,
            address=address,
            limits=limits,
            shown_output=host.show,
            use_fork_server=host.warm,
            security=memory_security,
            metrics=metrics,
            through_mpi=host.launcher == "mpiexec",
            begin_anew=host.again,
        )
        opened = etcd_log or closing.enter_context(contextlib.closing(open_run_log(host.run_dir)))
        print_line = partial(common.print_error, "ckpt-run")
        return Agent(job.run_spec(hosts, directory), host_options, opened, print_line).run()


def _require_linux() -> None:
    """Raise CkptError on a system without the calls by which an agent watches its ranks."""
    if not hasattr(os, "pidfd_open"):
        raise CkptError(
            "ckpt-run needs Linux, because it watches ranks by pidfd_open and /proc; start the program without it: "
            "ckpt.Checkpointer also saves and resumes by itself"
        )


def _check_name(name: str | None) -> None:
    """Raise UsageError if --name can't be the name of a host."""
    if name:
        with common.as_usage_errors():
            host_identity.check_host_name(name)


def _host_name_and_address(job: JobOptions, host: HostRunOptions, state: str | None) -> tuple[str, str]:
    """Return the name and the address of this host. Raises CkptError if other options of the host can't be used.

    state: the URL of the log of a run on several hosts; else None.
    """
    from ckpt.recovery.ranks import launch

    name = host_identity.check_host_name(host.name or host_identity.host_name(host.launcher, os.environ))
    if job.nnodes is None:
        host_identity.require_host_count(host.launcher, os.environ)
    host_identity.require_creatable(host.run_dir)
    address = (host.address or "").strip("[]") or host_identity.host_address(state)
    launch.free_port(address)  # the agent looks for another one; this raises the error of a wrong --address
    return name, address


def _adapted_directory(adapt: str, job: JobOptions, host: HostRunOptions, hosts: int) -> str | None:
    """Return the absolute URL for the checkpoints, None without --dir; prepare the environment of the ranks for --adapt."""
    directory = job.directory
    if run_adapt.is_on(adapt):
        with common.as_usage_errors():
            directory = run_adapt.directory_for(directory, host.run_dir, hosts)
            run_adapt.set_environment(job.command)
    return None if directory is None else _share_directory(directory)


def _set_rank_environment(job: JobOptions, launcher: str, security: SecurityOptions) -> None:
    """Set environment variables of this process, which the ranks inherit."""
    from ckpt.recovery.ranks.allowed_variables import ALLOWED_VARIABLES
    from ckpt.recovery.ranks.launch import AGENT_VARIABLE
    from ckpt.storage.node.security_options import VARIABLES
    from ckpt.training.loss_spikes import FACTOR_VARIABLE

    if launcher == "slurm":  # these describe the agents: more than the ranks of an attempt on the only host that is left
        for variable in ("SLURM_STEP_NUM_TASKS", "PMI_RANK", "PMI_SIZE"):
            os.environ.pop(variable, None)
    if AGENT_VARIABLE in os.environ:  # a rank of another run starts this one, which has another state and other batches
        for variable in (AGENT_VARIABLE, *ALLOWED_VARIABLES):
            os.environ.pop(variable, None)
    if job.spike is not None:
        os.environ[FACTOR_VARIABLE] = str(job.spike)
    insecure = "1" if security.insecure else None
    variables = {
        VARIABLES.token: security.token_file,
        VARIABLES.certificate: security.tls_cert,
        VARIABLES.key: security.tls_key,
        VARIABLES.authority: security.ca_file,
        INSECURE_VARIABLE: insecure,
    }
    os.environ.update({variable: value for variable, value in variables.items() if value})
    if security.token_file:
        os.environ.pop(TOKEN_VARIABLE, None)


def _check_hosts(job: JobOptions, launcher: str, hosts: int, state: str | None) -> None:
    """Raise UsageError for numbers of hosts that don't fit together, or don't fit the launcher."""
    from ckpt.groups.launchers import MAX_RANKS

    if max(job.ranks * max(1, hosts), job.spares) > MAX_RANKS:
        raise click.UsageError(
            f"-n {job.ranks} on {format_count(hosts, 'host')} with --spares {job.spares}: a job has at most {MAX_RANKS:,} "
            "ranks and spares; give smaller numbers"
        )
    if launcher == "k8s" and job.nnodes is None:
        raise click.UsageError(
            "--launcher k8s: a pod knows its name, but not the number of pods, so each would run a job of its own; give "
            "--nnodes, without the spares"
        )
    if job.spares and hosts < 2:
        raise click.UsageError(
            f"--spares {job.spares} needs --nnodes 2 or more, because spares are hosts; leave it out on one host"
        )
    if job.least is not None and job.least > hosts:
        raise click.UsageError(f"--min {job.least} is more than the {format_count(hosts, 'host')} of --nnodes; lower it")
    if launcher == "mpiexec" and hosts > 1:
        raise click.UsageError("--launcher mpiexec starts the ranks of one host; leave out --nnodes")
    if launcher in ("slurm", "torchrun", "k8s") and hosts > 1 and state is None:
        raise click.UsageError(f"{hosts} hosts share no file for the log of the run; give --state etcd://HOST:PORT/NAME")


def _check_command(command: Sequence[str], launcher: str) -> None:
    """Raise UsageError or CkptError for a command that can't be started; print a hint if the launcher needs another option."""
    if not command[0].strip():
        raise click.UsageError("the command is empty (an unset variable?); write ckpt-run -- python train.py")
    _require_startable(command)
    if launcher == "mpiexec":
        mpi.find_mpiexec()
    if hint := host_identity.launcher_hint(launcher, command):
        common.print_error("ckpt-run", hint)


def _share_directory(url: str) -> str:
    """Return the absolute URL of --dir, and put it into the environment, which the ranks inherit."""
    from ckpt.repository.repository import DIRECTORY_VARIABLE

    os.environ[DIRECTORY_VARIABLE] = url = _usable_url(url)
    return url


def _require_startable(command: Sequence[str]) -> None:
    """Raise CkptError for a command that can't be started, and suggest a similar subcommand of ckpt-run."""
    from ckpt.recovery.ranks import launch

    try:
        launch.require_startable(command)
    except CkptError as error:
        if near := get_close_matches(command[0], _SUBCOMMANDS, 1):
            raise CkptError(f"there is no command {command[0]}; did you mean `ckpt-run {near[0]}`?") from error
        raise


def _usable_url(url: str) -> str:
    """Return a URL that does not depend on the current folder; raise CkptError if no step can be saved to it."""
    from ckpt.repository.repository import open_repository

    if not url:
        raise click.UsageError("--dir is empty (an unset variable?); give a folder or a URL, or leave it out")
    url = url if "://" in url else os.path.abspath(os.path.expanduser(url))
    try:
        open_repository(url).ensure()
    except CkptError as error:
        raise CkptError(f"--dir can't be used: {error}") from error
    return url


def _node_security(address: str, options: SecurityOptions) -> NodeSecurity | None:
    """Return the security options of the memory node of this host, which other hosts use.

    Returns None, and prints the reason, if anyone on the network could use it. Raises UsageError for a certificate and a key
    that can't be used.
    """
    from ckpt.storage.node.security_options import read_certificate, security_from_environment

    security = replace(security_from_environment(), insecure=options.insecure)
    if lacks := security.missing_options(address):
        common.print_error(
            "ckpt-run", f"no memory is kept for Tier('memory'), because other hosts could reach it at {address}: give {lacks}, "
            "or --insecure or --no-memory",
        )  # fmt: skip
        return None
    if security.certificate:
        with common.as_usage_errors():
            read_certificate(Path(security.certificate), Path(security.key))
    if options.insecure and not is_loopback(address):
        common.print_error("ckpt-run", f"--insecure: anyone who reaches {address} can read and write the memory of this job")
    return security


def _parse_metrics_address(address: str | None) -> tuple[str, int] | None:
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")
        usable = bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT
    except UnicodeError:
        usable = False
    if not usable:
        raise click.UsageError(f"--metrics {address}: write HOST:PORT, such as 127.0.0.1:9200")
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
    """Run the command as a console script."""
    if len(sys.argv) > 1 and sys.argv[1] in _SUBCOMMANDS:
        common.run(_SUBCOMMANDS[sys.argv.pop(1)])
    write_stderr_in_background()  # decisions don't wait for somebody who reads the messages
    common.run(command)


if __name__ == "__main__":
    main()
