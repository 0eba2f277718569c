"""An option of ckpt-run that is refused ends it before it has created or changed a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import assert_no_memory_is_left

from ckpt.recovery.ranks.host_identity import LAUNCHERS
from ckpt.tools.run import command as run_command

_USABLE_LAUNCHERS = {"local"} | ({"mpiexec"} if (Path(sys.executable).parent / "mpiexec").exists() else set())
"""Those that need nothing but this Python, without PATH."""
TWO_HOSTS = ["--nnodes", "2", "--state", "etcd://127.0.0.1:1/lab"]
REFUSED: dict[str, list[list[str]]] = {
    "ranks": [["-n", "0"], ["-n", "100000000"], ["-n", "x"], ["-n", "9000000", "--nnodes", "2", "--min", "1"]],
    "nnodes": [["--nnodes", "0"], ["--nnodes", "2", "--launcher", "mpiexec"]],
    "least": [["--min", "0"], ["--min", "2"]],
    "spares": [["--spares", "1"], ["--nnodes", "2", "--spares", f"{1 << 70}"]],
    "state": [
        ["--state", "http://h:1/lab"],
        ["--state", "etcd://h:port/lab"],
        ["--nnodes", "2", "--state", "etcd://h:port/lab"],
        ["--state", "etcd://h:99999/lab"],
        ["--state", "etcd://h/lab"],
        ["--state", "etcd://,/lab"],
        ["--nnodes", "2", "--state", "etcd://etcd..lab:2379/lab"],
        ["--nnodes", "2", "--launcher", "k8s", "--name", "a"],
        ["--state", "etcd://h:0/lab"],
        ["--state", "etcd://[::1:1/lab"],
        ["--state", "etcd://h:1,h/lab"],
    ],
    "directory": [
        ["--dir", ""],
        ["--dir", "nowhere://x"],
        ["--dir", "{}/file"],
        ["--dir", "{}/other"],
        ["--dir", "/proc/none"],
    ],
    "adapt": [["--adapt=nonsense"], ["--adapt", "--", sys.executable, "-I", "-c", "0"]],
    "run_dir": [["--run-dir", "{}/file"], ["--run-dir", "{}/file/run"]],
    "launcher": [["--launcher", name] for name in (*LAUNCHERS, "nonsense") if name not in _USABLE_LAUNCHERS]
    + [["--launcher", "slurm", "--name", "a"], ["--launcher", "torchrun", "--name", "a"]],
    "name": [["--name", "a/b"], [*TWO_HOSTS, "--name", "-a"]],
    "address": [["--address", "192.0.2.1"], ["--address", "host..lab"], ["--address", "x" * 64]],
    "restarts": [["--restarts", "-1"], ["--restarts", f"{1 << 63}"]],
    "grace": [["--grace", "-1"], ["--grace", "inf"]],
    "patience": [["--patience", "nan"]],
    "give_up": [["--give-up", "-1"]],
    "hang": [["--hang", "0"], ["--hang", "20", "--first-hang", "10"], ["--hang", "inf", "--first-hang", "10"]],
    "first_hang": [["--first-hang", "0.5"], ["--first-hang", "9"]],
    "spike": [["--spike", "0"]],
    "straggler": [["--straggler", "1"]],
    "straggler_after": [["--straggler-after", "0"]],
    "token_file": [["--token-file", "{}/none"], ["--token-file", "{}/other/binary", "--state", "etcd://127.0.0.1:1/lab"]],
    "tls_cert": [["--tls-cert", "{}/none"]],
    "tls_key": [["--tls-key", "{}/none"]],
    "ca_file": [["--ca-file", "{}/none"]],
    "metrics": [["--metrics", text] for text in ("nonsense", ":9200", "127.0.0.1:99999", "127.0.0.1:0", f"{'ü' * 70}.b:80")],
    "show": [["--show", "1"]],
    "command": [[], ["--", ""], ["--", "/none/such"], ["whyy"], ["--", sys.executable, "/none/such.py"], ["--none-such"]],
}
"""By parameter of the command, lists of arguments that are refused because of it. In them, {} is the folder of the test."""
NEVER_REFUSED = {"again", "warm", "memory", "insecure"}


def test_each_option_is_known_here() -> None:
    assert {parameter.name for parameter in run_command.params} == REFUSED.keys() | NEVER_REFUSED


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_option_leaves_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/binary").write_bytes(b"\xff\xfe")
    before = sorted(tmp_path.rglob("*"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "GROUP_", "PATH"))}
    for refused in REFUSED[name]:
        arguments = [argument.replace("{}", str(tmp_path)) for argument in refused]
        if name != "command" and "--" not in arguments:
            arguments += ["--", sys.executable, "-c", ""]
        options = ["--run-dir", str(tmp_path / "run"), "--dir", str(tmp_path / "repo")]
        done = subprocess.run(
            [sys.executable, "-m", "ckpt.tools.run", *options, *arguments], capture_output=True, text=True, timeout=600,
            check=False, cwd=tmp_path, env=environment,
        )  # fmt: skip
        assert done.returncode in (1, 2), (refused, done.stderr)
        assert "Traceback" not in done.stderr, refused
        assert sorted(tmp_path.rglob("*")) == before, (refused, done.stderr)
        assert_no_memory_is_left(tmp_path / "run")
