"""The options of ckpt-run: what all hosts of a job agree on, what is this host's own, and who may reach its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.recovery.ranks import host_identity
from ckpt.tools import common, run_queries
from ckpt.tools.command_options import CommandFunction, gather_options

if TYPE_CHECKING:
    from ckpt.recovery.policy.hang_limits import HangLimits
    from ckpt.recovery.run_log.run_spec import RunSpec

_FILE_TYPE = click.Path(exists=True, dir_okay=False, resolve_path=True)

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("-n", "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes on each host."),
    click.option("--nnodes", type=click.IntRange(1), help="Hosts; start it on each. More wait as spares.  [default: 1]"),
    click.option("--min", "least", type=click.IntRange(1), help="Go on with so many hosts, if need be.  [default: all]"),
    click.option(
        "--spares",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="So many more hosts are expected to wait, and it is said when there are fewer.",
    ),
    run_queries.state_option,
    click.option("--dir", "directory", metavar="URL", help="Where ranks save that name no URL: ckpt.Checkpointer(), CKPT_DIR."),
    run_queries.folder_option,
    click.option(
        "--launcher",
        type=click.Choice(host_identity.LAUNCHERS),
        default="local",
        show_default=True,
        help="mpiexec: starts the ranks. Others start this command on each host: its name is theirs, and but for k8s --nnodes.",
    ),
    click.option("--name", help="Of this host.  [default: as the launcher or the system calls it]"),
    click.option("--address", help="Where other hosts reach this one.  [default: the one that reaches the state]"),
    click.option(
        "--restarts",
        type=click.IntRange(0),
        default=10,
        show_default=True,
        help="Restarts in a row without a newer step.",
    ),
    click.option(
        "--grace",
        type=common.Number(0),
        default=30.0,
        show_default=True,
        help="Seconds to save in, after SIGTERM.",
    ),
    click.option(
        "--patience",
        type=common.Number(0, never=True),
        default=30.0,
        show_default=True,
        help="Seconds to wait for a host in place of a lost one, before going on with fewer.",
    ),
    click.option(
        "--give-up",
        type=common.Number(0, never=True),
        default=600.0,
        show_default=True,
        help="Seconds to wait for too few hosts, and for all of them at first.",
    ),
    click.option(
        "--hang",
        type=common.Number(1, never=True),
        default=10.0,
        show_default=True,
        help="Least seconds of silence that are a hang, in a step; elsewhere, as in a save, 30 times as many.",
    ),
    click.option(
        "--first-hang",
        type=common.Number(1, never=True),
        help="Most seconds of silence, in any phase, and as long as little is learned of it.  [default: 900 in a step]",
    ),
    click.option(
        "--spike",
        type=common.Number(0, min_open=True),
        metavar="FACTOR",
        help="A loss that is so many times the usual spread above the usual is a failure; 10 is a good value. Off unless "
        "given.",
    ),
    click.option(
        "--straggler",
        type=common.Number(1, min_open=True),
        metavar="FACTOR",
        help="Go on without a host that has a rank FACTOR times as slow as the median, where a spare waits; else it is only "
        "said.",
    ),
    click.option(
        "--straggler-after",
        type=common.Number(0, min_open=True),
        default=60.0,
        show_default=True,
        help="Seconds that a rank must have been slow.",
    ),
    click.option("--again", is_flag=True, help="Begin anew where the run on several hosts has come to its end."),
    click.option(
        "--warm/--cold",
        default=True,
        show_default=True,
        help="Keep a process that has imported what ranks import, to fork them.",
    ),
    click.option(
        "--memory/--no-memory",
        default=True,
        show_default=True,
        help="Hosts keep memory for Tier('memory'), a copy of everything on two of them.",
    ),
    click.option(
        "--token-file",
        type=_FILE_TYPE,
        help="The job's secret, the same on all hosts: signs its log in etcd.  [default: $CKPT_TOKEN, $CKPT_TOKEN_FILE]",
    ),
    click.option("--tls-cert", type=_FILE_TYPE, help="The certificate chain of this host, PEM."),
    click.option("--tls-key", type=_FILE_TYPE, help="Its key, PEM."),
    click.option(
        "--ca-file", type=_FILE_TYPE, help="The authority of the certificates of all hosts.  [default: $CKPT_CA_FILE]"
    ),
    click.option("--insecure", is_flag=True, help="Let other hosts reach the memory of this one without token or TLS."),
    click.option("--metrics", metavar="HOST:PORT", help="Serve Prometheus' metrics there, at /metrics."),
    click.option(
        "--show", type=click.Choice(["0", "all", "none"]), default="0", show_default=True, help="Whose output to show."
    ),
    click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED),
)
"""In the order of --help."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What is the same on all hosts of a job. Fields are named as the options, whose help says what they mean."""

    command: tuple[str, ...]
    ranks: int
    nnodes: int | None
    least: int | None
    spares: int
    directory: str | None
    restarts: int
    grace: float
    patience: float
    give_up: float
    spike: float | None
    straggler: float | None
    straggler_after: float

    def host_count(self, launcher: str, environment: Mapping[str, str]) -> int:
        """How many hosts the job runs on, without spares: as --nnodes says, or else the launcher."""
        return self.nnodes or (host_identity.host_count(launcher, environment) or 1) - self.spares

    def run_spec(self, hosts: int, directory: str | None) -> RunSpec:
        """What the hosts agree on, for the log of the run. directory: as all hosts name it."""
        from ckpt.recovery.run_log.run_spec import RunSpec

        return RunSpec(
            self.command, self.ranks, hosts, self.least or hosts, self.restarts, self.grace, self.patience, self.give_up,
            self.spares, self.straggler or 0.0, self.straggler_after, directory or "",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostRunOptions:
    """What is this host's own."""

    run_dir: Path
    launcher: str
    name: str | None
    address: str | None
    hang: float
    first_hang: float | None
    again: bool
    warm: bool
    memory: bool
    metrics: str | None
    show: str

    def hang_limits(self) -> HangLimits:
        """How long a rank may be silent."""
        from ckpt.recovery.policy.hang_limits import INITIAL_LIMIT_SECONDS, HangLimits, uniform_initial_limits

        first = INITIAL_LIMIT_SECONDS if self.first_hang is None else uniform_initial_limits(self.first_hang)
        return HangLimits(least_seconds=self.hang, initial_limit_seconds=first)


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """Who may reach the memory of this host, and how its log is signed."""

    token_file: str | None
    tls_cert: str | None
    tls_key: str | None
    ca_file: str | None
    insecure: bool


def run_options(function: CommandFunction) -> CommandFunction:
    """Give a command the options of ckpt-run: they reach it as `state`, `job`, `host` and `security`."""
    for gathered in (("job", JobOptions), ("host", HostRunOptions), ("security", SecurityOptions)):
        function = gather_options(*gathered)(function)
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
