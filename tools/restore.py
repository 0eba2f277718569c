"""The command ckpt-restore: writes a step, or a part of it, as a file that other programs read."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

import ckpt
from ckpt.errors import StepNotFound
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import IntegrityError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.plural import first_few, format_count
from ckpt.storage.base.store import ByteProgress
from ckpt.tools import common
from ckpt.tools.atomic_destination import atomic_destination, check_destination, make_durable
from ckpt.tools.command_options import gather_options
from ckpt.tools.common import emit, format_size, printable
from ckpt.tools.export_names import ExportNames
from ckpt.tools.restore_options import HfOptions, SourceOptions, hugging_face_options, name_options
from ckpt.tools.step_contents import read_contents

# The module of each format, which is imported only for that format, because each needs another library.
_WRITER_MODULES = {
    "safetensors": "export_safetensors",
    "npz": "export_npz",
    "pt": "export_torch",
    "hdf5": "export_hdf5",
    "zarr": "export_zarr",
    "hf": "export_hf",
}
_FORMATS_BY_SUFFIX = {
    ".safetensors": "safetensors", ".npz": "npz", ".pt": "pt", ".pth": "pt", ".h5": "hdf5", ".hdf5": "hdf5",
    ".zarr": "zarr",
}  # fmt: skip


class _RestoreCommand(click.Command):
    """The command, with advice for users who write the step as an argument, as for ckpt-inspect."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "extra argument" not in error.message:
                raise
            advice = "ckpt-restore takes URL and DEST: give the step as an option, such as --step 7"
            raise click.UsageError(f"{error.message.rstrip('.')}; {advice}", ctx) from error


@click.command(
    "ckpt-restore",
    cls=_RestoreCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  ckpt-restore runs/a model.safetensors --only 'model.*'
  ckpt-restore runs/a state.pt --step 1000
  ckpt-restore s3://bucket/run weights.h5 --only model.embed --only model.head
  ckpt-restore runs/a /data/step --format zarr
  ckpt-restore runs/a my-model --hf --strip model. --config folder-of-the-first-model

\b
What each format contains:
  safetensors  arrays by leaf name; bfloat16 and float8 unchanged; the metadata has `values`
               (plain values), `tied` (second name: first name) and `dtypes`, each in JSON
  npz          arrays by leaf name; JSON texts in __values__, __tied__ and __dtypes__
  hdf5         a dataset for each leaf; ties are hard links; plain values in the root's
               attribute `values`, in JSON
  zarr         a Zarr v3 group (a folder) with an array for each leaf; the group's attributes
               are `values` and `tied`
  pt           the state itself with tensors for arrays, for torch.load(weights_only=True):
               dataclasses and objects become dicts, namedtuples and frozensets become tuples.
               With --strip or --rename it is one dict of all names instead, as a state_dict.
               The only format that needs the whole state in memory
  hf           a folder for from_pretrained of transformers or peft: model.safetensors, or several
               with an index; of an adapter, adapter_model.safetensors. Tied arrays are stored once

\b
Types that a format lacks (bfloat16, float8, int4 in npz, hdf5 and zarr; dates, text and
records in some) are stored as unsigned integers of the same size, or as bytes along one more
axis. The name of the true type is stored, too: safetensors and npz in `dtypes`, hdf5 and zarr
in the array's attribute `dtype`, pt as {"dtype": …, "raw": tensor}. In Python
  array.view(ml_dtypes.bfloat16)
gives the values back. Big-endian numbers get the machine's byte order if a format has only one.

\b
Every byte is checked while it is read. DEST gets its name only when it is complete. Until then
it is a hidden .DEST.*.ckpt-tmp in the same folder, which stays if the command is killed.
Exit status: 0 written, 1 not written (the message says why), 2 wrong usage.""",
)
@click.argument("url")
@click.argument("dest", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="The step to restore. Default: the newest committed one.")
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Only leaves of this name or shell pattern, such as 'model.*'. May be repeated.",
)
@click.option(
    "--format",
    "requested_format",
    type=click.Choice(list(_WRITER_MODULES)),
    help="The format. Default: by the suffix of DEST (.safetensors .npz .pt .pth .h5 .hdf5 .zarr).",
)
@name_options
@hugging_face_options
@common.key_option
@click.option("--overwrite", is_flag=True, help="Replace DEST if it exists.")
@click.version_option(ckpt.__version__, package_name="ckpt-store")
@gather_options("source", SourceOptions)
def command(
    url: str,
    dest: Path,
    source: SourceOptions,
    requested_format: str | None,
    names: ExportNames,
    hf: bool,
    hf_options: HfOptions,
    overwrite: bool,
) -> int:
    """Write a step of the checkpoint repository at URL to the file or folder DEST, in a format that other programs read.

    URL is a folder, or any URL that ckpt.save accepts (s3://bucket/run …). Nothing is changed there.
    """
    chosen = _choose_format(dest, requested_format, hf, hf_options)
    check_destination(dest, chosen, overwrite)
    repo = ckpt.open(url, key=source.key_file)
    checkpoint = repo[source.step] if source.step is not None else _newest_checkpoint(repo)
    selected = read_contents(checkpoint, source.only, names)
    writer = importlib.import_module(f"ckpt.tools.{_WRITER_MODULES[chosen]}")
    model = writer.prepare(selected, hf_options) if chosen == "hf" else None
    if model is not None:
        selected = model.contents
    passes = 2 if chosen == "pt" else 1  # .pt is read into memory, and then written
    with atomic_destination(dest, chosen, overwrite) as temporary:
        with common.progress(selected.nbytes * passes, f"step {checkpoint.step}") as advance:
            counted = _with_failpoint("restore.write", advance)
            raw = model.write(temporary, counted) if model is not None else writer.write(selected, str(temporary), counted)
        nbytes = make_durable(temporary)
        failpoint("restore.written")
    if raw:
        listed = first_few([printable(name) for name in raw], 5)
        click.echo(f"{chosen} lacks the types of {listed}: they are stored as plain integers, see --help", err=True)
    if model is not None and hf_options.config is None:
        click.echo(f"{dest} has no {model.config_name}, which from_pretrained needs: copy it there, or give --config", err=True)
    values = "" if model is not None else f" and {format_count(len(selected.values), 'plain value')}"
    emit(f"wrote {dest}: {format_count(len(selected.arrays), 'leaf')}{values} of step {checkpoint.step}, {format_size(nbytes)}")
    return 0


def _choose_format(dest: Path, requested: str | None, hf: bool, hf_options: HfOptions) -> str:
    """Return the format that the options or the suffix of `dest` name; raise UsageError if they don't fit together."""
    if hf and requested not in (None, "hf"):
        raise click.UsageError(f"--hf and --format {requested} exclude each other; leave one out")
    chosen = "hf" if hf else requested or _FORMATS_BY_SUFFIX.get(dest.suffix.lower())
    if chosen is None:
        raise click.UsageError(
            f"the suffix of {dest.name!r} names no format: choose one with --format, or give DEST one of the suffixes "
            + " ".join(_FORMATS_BY_SUFFIX)
        )
    if chosen != "hf" and hf_options != HfOptions():
        raise click.UsageError("--config, --max-shard-size and --adapter need --hf")
    return chosen


def main() -> None:
    """Run the command as a console script."""
    common.run(command)


def _newest_checkpoint(repo: Repository) -> Checkpoint:
    """Return the newest committed step; raise IntegrityError if its record is damaged.

    It is not replaced by an older step, because the user would not notice.
    """
    for number in repo.order().newest_first():
        try:
            return repo.checkpoint(repo.commit(number))
        except StepNotFound:  # a save is running, or was interrupted
            continue
        except IntegrityError as error:
            raise IntegrityError(f"{error}; name another step with --step") from error
    raise repo.no_step_error()


def _with_failpoint(name: str, advance: ByteProgress) -> ByteProgress:
    def passed(nbytes: int) -> None:
        failpoint(name)
        advance(nbytes)

    return passed


if __name__ == "__main__":
    main()
