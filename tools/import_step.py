"""The command ckpt-import: saves a checkpoint of another program as a step of a repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import ckpt
from ckpt.state.tree import flatten
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.plural import format_count
from ckpt.tools import common
from ckpt.tools.command_options import gather_options
from ckpt.tools.common import emit, format_size
from ckpt.tools.export_names import ExportNames
from ckpt.tools.import_files import FileLeaf
from ckpt.tools.import_formats import FORMATS, read_source
from ckpt.tools.import_names import renamed
from ckpt.tools.restore_options import name_options
from ckpt.tools.step_contents import Contents, read_contents

_STAGING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Target:
    """The step that is saved."""

    step: int | None
    key_file: str | None
    overwrite: bool


@click.command(
    "ckpt-import",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  ckpt-import model.pt runs/a --step 1000
  ckpt-import Llama-3-8B/ runs/base --under model
  ckpt-import old.pt runs/b --strip model. --rename '^encoder=body' --under model
  ckpt-import dcp-run/step-1000 s3://bucket/run --step 1000

\b
What SOURCE may be:
  torch        a file of torch.save, read as torch.load(weights_only=True) does. A file with other
               objects is refused
  safetensors  a file, an index with its files, or a folder with them
  hf-bin       a folder with pytorch_model.bin, or with pytorch_model.bin.index.json
  dcp          a folder of torch.distributed.checkpoint (of FSDP, torchtitan …)
  megatron     a folder of Megatron-Core (torch_dist), for ckpt.adapters.megatron. Objects of other
               classes than plain values are left out, and named
  deepspeed    the folder that save_checkpoint of DeepSpeed writes, of ZeRO stages 1, 2 and 3. The state
               is that of ckpt.adapters.deepspeed.EngineState and ckpt.adapters.torch.ModelState
  deepspeed-universal
               the folder that DeepSpeed's ds_to_universal writes, of ZeRO stages 1, 2 and 3. The state
               is that of ckpt.adapters.torch.ModelState
  orbax        a step of Orbax, or a folder of a CheckpointManager, of which the newest step is read
  paddle       a file of paddle.save, or a folder with a .pdparams and a .pdopt file, whose state is that
               of ckpt.adapters.paddle.ModelState. A file with other objects is refused
  paddle-distributed
               a folder of paddle.distributed.save_state_dict, or one of its .metadata files
  tensorflow   a checkpoint of TensorFlow by its prefix or index, a SavedModel, or a folder of which the
               newest checkpoint is read

\b
For other formats the error names what to do. Arrays are read in pieces, so that the memory does not
depend on their size; files of torch before 1.6, and of paddle.save(protocol=2), are read as a whole,
and Orbax needs up to three times the size of the largest array.
With --strip or --rename, the state becomes one dict of all names, as a state_dict.
After the save, each array is read again from the source and from the step, and compared. An
interrupted import leaves no step.
Exit status: 0 imported, 1 not imported (the message says why), 2 wrong usage.""",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("url")
@click.option(
    "--step", type=click.IntRange(min=0), help="The number of the step. Default: the one after the newest, at first 0."
)
@click.option("--only", multiple=True, metavar="PATTERN", help="Only what has this name or shell pattern. May be repeated.")
@click.option("--under", metavar="KEY", help="Put all that SOURCE has below this key of the state, such as model.")
@name_options
@click.option("--format", "requested_format", type=click.Choice(FORMATS), help="The format. Default: it is recognised.")
@click.option("--key-file", metavar="FILE", help="Sign the step with the key in this file. Default: the file in CKPT_KEY_FILE.")
@click.option("--overwrite", is_flag=True, help="Replace the step if it exists.")
@click.version_option(ckpt.__version__, package_name="ckpt-store")
@gather_options("target", _Target)
def command(
    source: Path,
    url: str,
    only: tuple[str, ...],
    under: str | None,
    requested_format: str | None,
    names: ExportNames,
    target: _Target,
) -> int:
    """Save the checkpoint SOURCE of another program as a step of the repository at URL.

    URL is a folder, or any URL that ckpt.save accepts (s3://bucket/run …). SOURCE is not changed.
    """
    state = renamed(read_source(source, requested_format, only), names, source)
    if under:
        state = {under: state}
    checkpoint = ckpt.save(
        state, url, target.step, group=None, memory=_STAGING_BYTES, key=target.key_file, overwrite=target.overwrite, nan="allow"
    )  # fmt: skip
    failpoint("import.saved")
    contents = read_contents(checkpoint)
    _compare(state, contents, source)
    emit(
        f"imported {source} as step {checkpoint.step} of {url}: {format_count(len(contents.arrays), 'leaf')} and "
        f"{format_count(len(contents.values), 'plain value')}, {format_size(contents.nbytes)}"
    )
    return 0


def _compare(state: Any, contents: Contents, source: Path) -> None:
    """Raise CkptError if an array of the step differs from the source, which may have changed during the import."""
    leaves = flatten(state).leaves
    with common.progress(contents.nbytes, "comparing") as advance:
        for array, box, data in contents.read():
            leaf = leaves[array.leaf]
            if isinstance(leaf, FileLeaf):
                expected = np.empty(data.nbytes, np.uint8)
                leaf.read(box, expected)
                if not np.array_equal(np.ascontiguousarray(data).reshape(-1).view(np.uint8), expected):
                    raise CkptError(
                        f"leaf {array.leaf} of {contents.checkpoint.where} differs from {source}, which was changed during the "
                        "import: import it again with --overwrite"
                    )
            advance(data.nbytes)


def main() -> None:
    """Run the command as a console script."""
    common.run(command)


if __name__ == "__main__":
    main()
