"""The ports, exit statuses and files that pages of the documentation show are those of the commands."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from helpers.docs_pages import DOCS, ROOT, blocks

import ckpt
from ckpt.aggregator.cluster.config import config_from_table
from ckpt.tools import node, node_arguments, run

SITE = runpy.run_path(str(ROOT / ".ci/site/pages.py"))
SCRIPTS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of a page of the reference."""
    text = (DOCS / "reference" / page).read_text().partition(f"# {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def options(command: click.Command) -> dict[str, click.Parameter]:
    """Return the parameters of a command by its options, as `--listen`."""
    return {name: parameter for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


# --- ports -----------------------------------------------------------------------------------------------------------

COMMANDS = {"ckpt-node": options(node.command), "ckpt-run": options(run.command)}


def test_the_ports_are_those_of_the_options() -> None:
    listening = {(who, option): where for who, where, _, option in rows("ports.md", "Ports")}
    assert COMMANDS["ckpt-node"]["--listen"].default == listening["`ckpt-node`", "`--listen`"].partition(",")[0]
    assert not isinstance(COMMANDS["ckpt-node"]["--monitor"].default, str)  # click has a value for no default
    assert re.search(r"the port \+ 1000 \(. 1000 if the sum is above 65535\)", listening["`ckpt-node`", "`--monitor`"])
    assert [node_arguments.monitor_port(port) for port in (7070, 64535, 64536)] == [8070, 65535, 63536]
    assert not isinstance(COMMANDS["ckpt-run"]["--metrics"].default, str)
    assert listening["`ckpt-run`", "`--metrics`"] == "nowhere by default"


def test_the_options_beside_ports_exist() -> None:
    lines = [line for line in (DOCS / "reference/ports.md").read_text().splitlines() if line.startswith("|")]
    named = {(name, option) for line in lines for name in COMMANDS if name in line for option in re.findall(r"--[\w-]+", line)}
    assert len(named) > 8
    assert [(name, option) for name, option in named if option not in COMMANDS[name]] == []


# --- exit statuses ---------------------------------------------------------------------------------------------------

ENDS = {
    "0": "pass",
    "1": "raise ckpt.CkptError('it failed')",
    "2": "raise click.UsageError('no such option')",
    "130": "raise KeyboardInterrupt",
    "141": "read, write = os.pipe(); os.dup2(write, 1); os.close(read); common.emit('x' * 100_000)",
    "143": "os.kill(os.getpid(), signal.SIGTERM)",
}
"""What a command may do, by the status with which it then ends."""


def test_each_exit_status_has_a_row() -> None:
    assert [status for status, _ in rows("exit-status.md", "The commands")] == list(ENDS)


@pytest.mark.parametrize("status", ENDS)
def test_a_command_ends_with_the_status_of_the_page(status: str) -> None:
    body = f"""
import os, signal
import click
import ckpt
from ckpt.tools import common

@click.command("ckpt-inspect")
def command():
    {ENDS[status]}

common.run(command)
"""
    done = subprocess.run(
        [sys.executable, "-c", body], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == int(status), done.stderr


def test_status_1_is_explained_for_each_command() -> None:
    text = (DOCS / "reference/exit-status.md").read_text()
    explained = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `ckpt-"))
    assert set(re.findall(r"ckpt-\w+", explained)) == SCRIPTS - {"ckpt-run"}  # it has a table of its own
    admin = node.command.commands["admin"]
    assert isinstance(admin, click.Group)
    assert [
        name for name in admin.commands if f"`ckpt-node admin {name}`" not in explained and f"`{name}`" not in explained
    ] == []


def test_the_statuses_of_ckpt_run_are_those_of_its_help() -> None:
    statuses = [status for status, _ in rows("exit-status.md", "ckpt-run")]
    help_text = " ".join((run.command.help or "").split())
    assert statuses == ["0", "1", "2", "128 + n"]
    assert [status for status in statuses if status != "2" and f"{status} " not in help_text] == []


# --- what the API has ------------------------------------------------------------------------------------------------


def test_the_reference_has_each_public_name() -> None:
    described = {name for _, _, names in SITE["API"].values() for name in names}
    described |= set(re.findall(r"`(ckpt\.\w+)`", SITE["errors_page"]()))
    described |= {name.rpartition(".")[0] for name in described}  # modules
    assert sorted(name for name in ckpt.__all__ if f"ckpt.{name}" not in described) == ["__version__"]


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["configuration", "namespace"])
def test_a_configuration_file_can_be_read(page: str, tmp_path: Path) -> None:
    (block,) = [block for block in blocks(DOCS / f"reference/{page}.md") if block.kind == "toml"]
    (tmp_path / "token").write_text("a-token-of-a-test-1234\n")
    (tmp_path / "ca.pem").write_text("a certificate")
    (table,) = tomllib.loads(block.text.replace("/etc/ckpt", str(tmp_path)))["namespaces"].values()
    assert "cloud" in [member.name for member in config_from_table("lab", table, page).members]


def test_the_files_of_prometheus_can_be_read() -> None:
    files = {
        block.title: yaml.safe_load(block.text) for block in blocks(DOCS / "operations/monitoring.md") if block.kind == "yaml"
    }
    config, alerts = files["prometheus.yml"], files["ckpt-alerts.yml"]
    assert config["rule_files"] == ["ckpt-alerts.yml"]
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert {name for rule in rules for name in re.findall(r'job="([^"]+)"', rule["expr"])} <= jobs.keys()
    assert all(set(rule) <= {"alert", "expr", "for", "annotations"} and rule["annotations"]["summary"] for rule in rules)
    assert len({rule["alert"] for rule in rules}) == len(rules) > 6
    assert jobs["ckpt-node"][0].endswith(f":{node_arguments.monitor_port(7070)}")


def test_the_service_has_options_of_ckpt_node() -> None:
    (unit,) = [block for block in blocks(DOCS / "operations/deployment.md") if block.title == "ckpt-node@.service"]
    command = re.search(r"^ExecStart=((?:.*\\\n)*.*)$", unit.text, re.MULTILINE)
    assert command is not None
    program, *arguments = shlex.split(command[1].replace("\\\n", " "))
    assert Path(program).name == "ckpt-node"
    assert [name for name in arguments if name.startswith("--") and name not in COMMANDS["ckpt-node"]] == []
