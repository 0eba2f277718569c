"""`ckpt-run --adapt` without a framework that it adapts: where it acts, what it prints, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = "import os, sys\nprint('adapted', os.environ.get('CKPT_ADAPTED') == str(os.getpid()), flush=True)\n"
LOOP = """
import torch
p = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([p], 0.1)
for step in range(3):
    p.sum().backward()
    optimizer.step()
print("trained", flush=True)
"""
UNKNOWN_VERSION = "class Trainer:\n    def train_model(self):\n        print('trained', flush=True)\n"


def run(
    folder: Path, script: str, *options: str, command: tuple[str, ...] = (sys.executable,), ranks: int = 1, **variables: str
) -> tuple[int, str]:  # fmt: skip
    """Run a script by ckpt-run, and return the exit status and all that was printed."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")} | variables
    ckpt_run = [
        sys.executable,
        "-m",
        "ckpt.tools.run",
        "-n",
        str(ranks),
        "--restarts",
        "0",
        "--cold",
        "--show",
        "all",
        *options,
    ]
    done = subprocess.run(
        [*ckpt_run, "--", *command, "script.py"], cwd=folder, env=environment, text=True, timeout=600,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_loop_of_the_script_is_not_adapted_and_rank_0_prints_why(tmp_path: Path) -> None:
    status, printed = run(tmp_path, LOOP, "--adapt", ranks=2)
    assert (status, printed.count("trained")) == (0, 2), printed
    assert printed.count("this loop over torch is not adapted and saves nothing to ckpt: only the script knows") == 1


@pytest.mark.parametrize(
    ("options", "variables"),
    [((), {}), (("--adapt=off",), {}), (("--adapt",), {"CKPT_ADAPT": "off"}), ((), {"CKPT_ADAPT": "on"})],
)
def test_nothing_is_installed_without_the_option(tmp_path: Path, options: tuple[str, ...], variables: dict[str, str]) -> None:
    script = "import sys\nprint([f for f in sys.meta_path if 'ckpt' in type(f).__module__], 'ckpt' in sys.modules)"
    status, printed = run(tmp_path, script + LOOP, *options, **variables)
    assert status == 0, printed
    assert "[] False" in printed
    assert "not adapted" not in printed


def test_children_of_the_script_are_left_alone(tmp_path: Path) -> None:
    script = f"""
import multiprocessing, subprocess, sys
{SHOW}
def work():
    exec({LOOP!r})

if __name__ == "__main__":
    for kind in ("fork", "spawn"):
        child = multiprocessing.get_context(kind).Process(target=work)
        child.start()
        child.join()
    subprocess.run([sys.executable, "-c", {SHOW + LOOP!r}], check=True)
"""
    status, printed = run(tmp_path, script, "--adapt")
    assert status == 0, printed
    assert printed.count("trained") == 3
    assert printed.count("adapted True") == 1
    assert "not adapted" not in printed


def test_a_script_that_fails_at_an_import_keeps_its_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "trainer.py").write_text("import nothing_of_this_name\n")
    for options in ((), ("--adapt",)):
        assert run(tmp_path, "\nimport transformers.trainer\n", *options)[0]
    plain, adapted = (log.read_text() for log in sorted(tmp_path.rglob("rank-0.log")))
    assert adapted == plain
    assert plain.startswith("Traceback")
    assert plain.count("File ") == 2


def test_a_framework_of_an_unknown_version_is_named_and_the_script_runs(tmp_path: Path) -> None:
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "trainer.py").write_text(UNKNOWN_VERSION)
    status, printed = run(tmp_path, "from transformers.trainer import Trainer\nTrainer().train_model()\n", "--adapt")
    assert (status, "trained" in printed) == (0, True), printed
    assert "transformers.trainer is not adapted and saves nothing to ckpt: this version differs (AttributeError" in printed


def test_a_python_without_ckpt_runs_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "trainer.py").write_text(UNKNOWN_VERSION.replace("train_model", "train"))
    script = "import sys\nsys.modules['ckpt'] = None\nfrom transformers.trainer import Trainer\nTrainer().train()\n"
    status, printed = run(tmp_path, script, "--adapt")
    assert (status, "trained" in printed) == (0, True), printed
    assert "transformers.Trainer is not adapted and saves nothing to ckpt: ModuleNotFoundError" in printed


def test_a_script_that_uses_ckpt_is_left_alone(tmp_path: Path) -> None:
    script = "import ckpt\nwith ckpt.Checkpointer('steps') as ck:\n    ck.step(0, {'a': 1})\n" + LOOP
    status, printed = run(tmp_path, script, "--adapt")
    assert status == 0, printed
    assert "ckpt: this script uses ckpt itself, so --adapt leaves it alone" in printed
    assert "not adapted" not in printed


def test_a_script_without_a_framework_that_is_adapted_is_reported_at_its_end(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "import jax\n", "--adapt")
    assert status == 0, printed
    assert "ckpt: --adapt has found nothing to save. jax: only the script knows where its loop is" in printed
    assert run(tmp_path, "print('nothing')\n", "--adapt")[1].count("ckpt: ") == 0


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_script_with_lightning_is_not_reported_as_one_with_nothing_to_save(tmp_path: Path, package: str) -> None:
    """Lightning finds the callback of ckpt by an entry point, so no hook knows whether it has saved."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    status, printed = run(tmp_path, f"import torch, {package}\n", "--adapt")
    assert status == 0, printed
    assert "nothing to save" not in printed


def test_the_sitecustomize_of_the_user_still_runs(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("print('mine', __file__, flush=True)\n")
    script = SHOW + "import sitecustomize\nprint('module', sitecustomize.__file__, sys.path[1])\n"
    status, printed = run(tmp_path, script, "--adapt", PYTHONPATH=str(folder))
    assert status == 0, printed
    assert f"mine {folder}/sitecustomize.py" in printed
    assert f"module {folder}/sitecustomize.py {folder}" in printed
    assert "adapted True" in printed


def test_python_that_another_program_starts_is_adapted(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"exec {sys.executable} script.py\n")
    status, printed = run(tmp_path, SHOW, "--adapt", command=("bash", "train.sh"))
    assert status == 0, printed
    assert "ckpt-run: --adapt acts in Python only: in the first Python processes that bash starts" in printed
    assert "adapted True" in printed


def test_the_ranks_of_a_launcher_are_adapted(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    status, printed = run(tmp_path, SHOW + LOOP, "--adapt", command=launcher)
    assert status == 0, printed
    assert printed.count("adapted True") == 2
    assert printed.count("this loop over torch is not adapted") == 1


def test_python_that_ignores_its_environment_is_refused(tmp_path: Path) -> None:
    for flags in (("-I",), ("-uE",), ("-X", "dev", "-S")):
        status, printed = run(tmp_path, SHOW, "--adapt", command=(sys.executable, *flags))
        assert status, printed
        assert f"which python -{flags[-1][-1]} ignores: leave out -{flags[-1][-1]}, or --adapt" in printed
        assert "adapted" not in printed


def test_several_hosts_need_a_shared_place(tmp_path: Path) -> None:
    status, printed = run(tmp_path, SHOW, "--adapt", "--nnodes", "2")
    assert status
    assert "--adapt on several hosts needs a place that all of them share: give --dir URL" in printed


def test_the_list_names_what_is_adapted_and_what_is_not() -> None:
    command = [sys.executable, "-m", "ckpt.tools.run", "--adapt=list"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    adapted, others = printed.split("not adapted:")
    assert all(
        name in adapted for name in ("transformers.Trainer", "keras.Model", "accelerate.Accelerator", "lightning.Trainer")
    )
    assert all(f"\n  {name} " in others for name in ("torch", "jax", "accelerate", "paddle", "deepspeed"))
