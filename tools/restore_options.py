"""The options of `ckpt-restore` for names and for folders of Hugging Face."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import click

from ckpt.tools.command_options import CommandFunction, gather_options
from ckpt.tools.common import Size
from ckpt.tools.export_names import ExportNames


class RenameOption(click.ParamType):  # type: ignore[type-arg]
    """The type of the option --rename: a regular expression and its replacement."""

    name = "rename"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        pattern, equals, replacement = str(value).rpartition("=")  # a regular expression may contain `=`, as in (?=…)
        if not equals or not pattern:
            self.fail(f"{value!r} does not have the form 'old=new', as in 'model\\.=transformer.'", param, ctx)
        try:
            re.sub(pattern, replacement, "")
        except (re.error, IndexError) as error:
            self.fail(
                f"{value!r} is not a regular expression of Python and its replacement ({error}); write 'old=new'", param, ctx
            )
        return pattern, replacement


def name_options(command: CommandFunction) -> CommandFunction:
    """Add the options --strip and --rename to a command, which gets them as one `names`."""
    command = gather_options("names", ExportNames)(command)
    command = click.option(
        "--rename", multiple=True, type=RenameOption(), metavar="OLD=NEW",
        help="Replace what the regular expression OLD matches in a name, after --strip, by NEW. May be repeated.",
    )(command)  # fmt: skip
    return click.option(
        "--strip", default="", metavar="PREFIX",
        help="Only leaves whose names begin with PREFIX, such as 'model.', which is removed from their names.",
    )(command)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Which part of a repository is read."""

    step: int | None = None
    """The step; None for the newest committed one."""
    only: tuple[str, ...] = ()
    """Names or shell patterns of leaves; empty for all."""
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class HfOptions:
    """What `--hf` needs to know."""

    max_shard_size: int | None = None
    """Bytes of the arrays in one file; None for the default."""
    config: Path | None = None
    """A configuration file, or the folder of a model with configuration and tokenizer."""
    adapter: str | None = None
    """The name of the adapter of peft to export; None for the only one."""


def hugging_face_options(command: CommandFunction) -> CommandFunction:
    """Add the options for a folder of Hugging Face to a command, which gets them as one `hf_options`."""
    command = gather_options("hf_options", HfOptions)(command)
    for option in (
        click.option("--adapter", metavar="NAME", help="With --hf: the adapter of peft to write. Default: the only one."),
        click.option(
            "--config", type=click.Path(exists=True, path_type=Path), metavar="PATH",
            help="With --hf: a config.json (of an adapter: adapter_config.json), or a folder of which the configuration and "
            "the tokenizer are copied.",
        ),
        click.option(
            "--max-shard-size", type=Size(), metavar="SIZE", help="With --hf: the largest file of arrays. Default: 5GB.",
        ),
        click.option("--hf", is_flag=True, help="The same as --format hf."),
    ):  # fmt: skip
        command = option(command)
    return command
