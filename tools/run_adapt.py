"""The option --adapt of ckpt-run: what it sets in the environment of the ranks, and the list of hooks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from ckpt.adapters.adapt import startup
from ckpt.adapters.adapt.startup import hooks
from ckpt.recovery.ranks.fork_client import PYTHON_NAME
from ckpt.storage.base.errors import InvalidArgument
from ckpt.tools import common

_FOLDER = str(Path(startup.__file__).parent)


def _print_list(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if value == "list":
        common.emit(_list_of_hooks())
        context.exit()
    return value


adapt_option = click.option(
    "--adapt",
    type=click.Choice(["on", "off", "list"]),
    is_flag=False,
    flag_value="on",
    default="off",
    is_eager=True,
    callback=_print_list,
    metavar="[=off|list]",
    help="Let a script that does not use ckpt save and resume, through its framework; =list shows how.",
)


def _list_of_hooks() -> str:
    adapted = [*((hook.name, hook.effect) for hook in hooks.HOOKS), ("lightning.Trainer", hooks.LIGHTNING)]
    others = [(refusal.name, refusal.reason) for refusal in hooks.REFUSALS]
    first, second = ("\n".join(f"  {name:22} {text}" for name, text in rows) for rows in (adapted, others))
    return f"adapted:\n{first}\nnot adapted:\n{second}"


def is_on(adapt: str) -> bool:
    """Return whether the hooks are to be installed: --adapt was given, and CKPT_ADAPT=off was not."""
    return adapt == "on" and os.environ.get(hooks.SWITCH) != "off"


def set_environment(command: Sequence[str]) -> None:
    """Set environment variables of this process by which Python, in the ranks, installs the hooks.

    Raises InvalidArgument if an option of Python makes it ignore them.
    """
    if PYTHON_NAME.fullmatch(os.path.basename(command[0])):
        if flag := _ignoring_flag(command[1:]):
            raise InvalidArgument(
                f"--adapt works through PYTHONPATH, which python -{flag} ignores: leave out -{flag}, or --adapt"
            )
    else:
        common.print_error("ckpt-run", f"--adapt acts in Python only: in the first Python processes that {command[0]} starts")
    before = os.environ.get("PYTHONPATH")
    folders = [folder for folder in (before or "").split(os.pathsep) if folder != _FOLDER] if before else []
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *folders])
    os.environ[hooks.SWITCH] = "on"


def _ignoring_flag(arguments: Sequence[str]) -> str:
    """Return the flag of Python, E, I or S, that keeps it from running sitecustomize; "" if there is none."""
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith("-") or argument in ("-", "--"):
            return ""
        for index, letter in enumerate(argument[1:], 2):
            if letter in "EIS":
                return letter
            if letter in "cm":
                return ""
            if letter in "WX":  # the rest is its value, or the next argument
                if index == len(argument):
                    next(remaining, "")
                break
    return ""


def directory_for(directory: str | None, run_dir: Path, hosts: int) -> str | None:
    """Return the repository of adapted trainings: that of --dir or CKPT_DIR, or one in the folder of the run.

    Raises InvalidArgument on several hosts without either, because they share no folder.
    """
    from ckpt.repository.repository import DIRECTORY_VARIABLE

    if directory is not None or os.environ.get(DIRECTORY_VARIABLE):
        return directory
    if hosts > 1:
        raise InvalidArgument("--adapt on several hosts needs a place that all of them share: give --dir URL")
    return str(run_dir / "checkpoints")
