"""The options of ckpt-run: those of the job, which are the same on all hosts, those of this host, and security."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.recovery.ranks import host_identity
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.tools import common, run_adapt, run_queries
from ckpt.tools.command_options import CommandFunction, gather_options

if TYPE_CHECKING:
    from ckpt.recovery.policy.hang_limits import HangLimits

_FILE_TYPE = click.Path(exists=True, dir_okay=False, resolve_path=True)
_MAX_RESTARTS = 10**9
"""The run log has numbers of 64 bits. Nobody waits for the end of so many restarts."""

_USUAL = RunSpec((), 0)
"""Its optional fields have the defaults of their options."""

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("-n", "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes on each host."),
    click.option(
        "--nnodes",
        type=click.IntRange(1),
        help="The number of hosts; start ckpt-run on each. Further hosts wait as spares.  [default: 1]",
    ),
    click.option(
        "--min", "least", type=click.IntRange(1), help="Continue with this many hosts, if there are no more.  [default: all]"
    ),
    click.option(
        "--spares",
        type=click.IntRange(0),
        default=_USUAL.spares,
        show_default=True,
        help="The number of hosts that should wait as spares; a note is logged if there are fewer.",
    ),
    run_queries.state_option,
    click.option(
        "--dir", "directory", metavar="URL", help="The URL for ckpt.Checkpointer() without a URL; ranks get it as CKPT_DIR."
    ),
    run_adapt.adapt_option,
    run_queries.folder_option,
    click.option(
        "--launcher",
        type=click.Choice(host_identity.LAUNCHERS),
        default="local",
        show_default=True,
        help="What starts processes. mpiexec starts the ranks; the others start this command on each host, and give it the "
        "host name and, except k8s, --nnodes.",
    ),
    click.option("--name", help="The name of this host.  [default: its name in the launcher or the system]"),
    click.option(
        "--address", help="The address of this host for other hosts.  [default: that of its connection to the run log]"
    ),
    click.option(
        "--restarts",
        type=click.IntRange(0, _MAX_RESTARTS),
        default=_USUAL.restarts,
        show_default=True,
        help="The most restarts in a row without a newer step.",
    ),
    click.option(
        "--grace",
        type=common.Number(0),
        default=_USUAL.grace_seconds,
        show_default=True,
        help="Seconds for a last save after SIGTERM.",
    ),
    click.option(
        "--patience",
        type=common.Number(0, never=True),
        default=_USUAL.patience_seconds,
        show_default=True,
        help="Seconds to wait for a replacement of a lost host, before the job continues with fewer.",
    ),
    click.option(
        "--give-up",
        type=common.Number(0, never=True),
        default=_USUAL.give_up_seconds,
        show_default=True,
        help="Seconds to wait for enough hosts, and at the start for all of them, before the job is given up.",
    ),
    click.option(
        "--hang",
        type=common.Number(1, never=True),
        default=10.0,
        show_default=True,
        help="Seconds without a heartbeat in a step that are never a hang; in other phases, such as a save, 30 times as many, "
        "but at most --first-hang.",
    ),
    click.option(
        "--first-hang",
        type=common.Number(1, never=True),
        help="Seconds without a heartbeat that are always a hang, in any phase but `end`; the limit until enough steps are "
        "measured.  [default: 900 in a step]",
    ),
    click.option(
        "--spike",
        type=common.Number(0, min_open=True),
        metavar="FACTOR",
        help="A loss that exceeds the median by FACTOR times the usual spread is a failure; 10 is a good value. Off by "
        "default.",
    ),
    click.option(
        "--straggler",
        type=common.Number(1, min_open=True),
        metavar="FACTOR",
        help="Replace a host by a spare if a rank of it is FACTOR times as slow as the median; without a spare, only log it.",
    ),
    click.option(
        "--straggler-after",
        type=common.Number(0, min_open=True),
        default=_USUAL.straggler_seconds,
        show_default=True,
        help="Seconds that a rank must have been slow before.",
    ),
    click.option("--again", is_flag=True, help="Begin another run if the run on several hosts has ended."),
    click.option(
        "--warm/--cold",
        default=True,
        show_default=True,
        help="Keep a fork server, a process with the imports of the ranks, to restart them fast.",
    ),
    click.option(
        "--memory/--no-memory",
        default=True,
        show_default=True,
        help="Keep memory of the hosts for Tier('memory'), with a copy of each step on two of them.",
    ),
    click.option(
        "--token-file",
        type=_FILE_TYPE,
        help="The secret of the job, the same on all hosts, which signs its log in etcd.  [default: $CKPT_TOKEN, "
        "$CKPT_TOKEN_FILE]",
    ),
    click.option(
        "--tls-cert", type=_FILE_TYPE, help="The certificate chain of this host, PEM.  [default: $CKPT_TLS_CERT_FILE]"
    ),
    click.option("--tls-key", type=_FILE_TYPE, help="The key of the certificate, PEM.  [default: $CKPT_TLS_KEY_FILE]"),
    click.option(
        "--ca-file", type=_FILE_TYPE, help="The authority of the certificates of all hosts.  [default: $CKPT_CA_FILE]"
    ),
    click.option("--insecure", is_flag=True, help="Let other hosts use the memory of this host without token or TLS."),
    click.option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics at this address, at /metrics."),
    click.option(
        "--show",
        type=click.Choice(["0", "all", "none"]),
        default="0",
        show_default=True,
        help="The ranks whose output is shown.",
    ),
    click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED),
)
"""In the order of --help."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options that are the same on all hosts. The fields have the names of the options, whose help explains them."""

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
        """Return the number of hosts of the job, without spares: that of --nnodes, or of the launcher."""
        return self.nnodes or (host_identity.host_count(launcher, environment) or 1) - self.spares

    def run_spec(self, hosts: int, directory: str | None) -> RunSpec:
        """Return the specification of the run, on which all hosts agree. directory: the URL of --dir, None without it."""
        from ckpt.recovery.run_log.run_spec import RunSpec

        return RunSpec(
            command=self.command,
            ranks=self.ranks,
            hosts=hosts,
            least=self.least or hosts,
            restarts=self.restarts,
            grace_seconds=self.grace,
            patience_seconds=self.patience,
            give_up_seconds=self.give_up,
            spares=self.spares,
            straggler=self.straggler or 0.0,
            straggler_seconds=self.straggler_after,
            directory=directory or "",
        )


@dataclass(frozen=True, slots=True)
class HostRunOptions:
    """The options of this host alone."""

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
        """Return how long a rank may send no heartbeat. Raises UsageError if --hang is more than --first-hang."""
        from ckpt.recovery.policy.hang_limits import HangLimits, default_initial_limits, uniform_initial_limits

        if self.first_hang is None:
            return HangLimits(least_seconds=self.hang, initial_limit_seconds=default_initial_limits(self.hang))
        if self.hang > self.first_hang:
            hang, first = f"{self.hang:g}", f"{self.first_hang:g}"
            raise click.UsageError(f"--hang {hang} is more than --first-hang {first}: lower --hang, or raise --first-hang")
        return HangLimits(least_seconds=self.hang, initial_limit_seconds=uniform_initial_limits(self.first_hang))


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """Who may use the memory of this host, and how its log is signed."""

    token_file: str | None
    tls_cert: str | None
    tls_key: str | None
    ca_file: str | None
    insecure: bool


def run_options(function: CommandFunction) -> CommandFunction:
    """Add the options of ckpt-run to a command, which gets them as `state`, `adapt`, `job`, `host` and `security`."""
    for gathered in (("job", JobOptions), ("host", HostRunOptions), ("security", SecurityOptions)):
        function = gather_options(*gathered)(function)
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
