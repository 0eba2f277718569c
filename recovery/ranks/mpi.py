"""Starts ranks by mpiexec, for programs that use MPI's own world: `ckpt-run --launcher mpiexec`.

mpiexec runs this module once for each rank. The module reads the rank from the variables of the MPI, sets the same variables
as ckpt-run does for other ranks, and replaces itself by the program.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.storage.base.errors import CkptError

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")
_LOG_VARIABLE, _PAGE_VARIABLE, _FIRST_RANK_VARIABLE = "CKPT_MPI_LOG", "CKPT_MPI_PAGE", "CKPT_MPI_FIRST"


def find_mpiexec() -> str:
    """Return the path of mpiexec, that of this Python if it has one. Raises CkptError if mpiexec is not installed."""
    in_environment = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(in_environment) if in_environment.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise CkptError("there is no mpiexec here; install an MPI (pip install mpich), or leave out --launcher mpiexec")
    return mpiexec


def mpiexec_command(wrapped: Sequence[str], count: int) -> list[str]:
    """Return the command that starts `count` ranks. Raises CkptError if mpiexec is not installed."""
    return [find_mpiexec(), "-n", str(count), sys.executable, "-m", "ckpt.recovery.ranks.mpi", *wrapped]


def wrapper_environment(first: int, page: str, log: str) -> dict[str, str]:
    """Return the variables that this module reads. page, log: the beginning of paths, up to the number of the rank."""
    return {_FIRST_RANK_VARIABLE: str(first), _PAGE_VARIABLE: page, _LOG_VARIABLE: log}


def mpi_rank(environ: Mapping[str, str]) -> int:
    """Return the rank that MPI has given this process. Raises CkptError for an unknown MPI."""
    for variable in _RANK_VARIABLES:
        if environ.get(variable, "").isdigit():
            return int(environ[variable])
    raise CkptError(f"this mpiexec sets none of {', '.join(_RANK_VARIABLES)}; use one of MPICH, Open MPI or MVAPICH")


def main(wrapped: Sequence[str]) -> None:
    """Set up the environment of the rank and execute the program. Raises CkptError if that can't be started."""
    from ckpt.training import heartbeat_page

    local = mpi_rank(os.environ)
    number = int(os.environ.pop(_FIRST_RANK_VARIABLE)) + local
    log = os.open(f"{os.environ.pop(_LOG_VARIABLE)}{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    page = f"{os.environ.pop(_PAGE_VARIABLE)}{number}"
    variables = {"RANK": str(number), "ROLE_RANK": str(number), "LOCAL_RANK": str(local), heartbeat_page.PAGE_VARIABLE: page}
    os.environ.update(variables)
    try:
        os.execvp(wrapped[0], list(wrapped))
    except OSError as error:
        raise CkptError(
            f"{wrapped[0]} can't be started: {error.strerror}; give a command that can be started in a shell"
        ) from error


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CkptError as error:
        sys.exit(str(error))
