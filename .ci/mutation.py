"""Changes the rules of ckpt one by one, and prints the changes that no test notices. `make mutation` runs it.

    python .ci/mutation.py                  all subjects
    python .ci/mutation.py decisions        one of them

mutmut changes one operator, constant or text of the code at a time, and runs the tests that reach it. A subject is a set of
files and the tests that state what they do. The run ends with an error where the tests notice less than 90 % of the changes
of a subject. Some changes alter nothing that a caller can see, so 100 % is not the aim.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST = 0.9
NOTICED = ("killed", "timeout", "segfault")
"""The outcomes of mutmut for a change that the tests notice."""


@dataclass(frozen=True)
class Subject:
    """Rules and their tests."""

    files: tuple[str, ...]
    """Their paths in the package as installed."""
    tests: tuple[str, ...]


SUBJECTS = {
    "decisions": Subject(
        tuple(f"ckpt/recovery/policy/{name}.py" for name in ("restart_decision", "hosts_of_next_attempt", "failure")),
        tuple(f"tests/unit/recovery/test_{name}.py" for name in ("restart_decision", "hosts_of_next_attempt", "decisions")),
    ),
    "registers": Subject(
        (
            "ckpt/storage/registers/base.py",
            "ckpt/storage/registers/fence_numbers.py",
            "ckpt/aggregator/records/register_update.py",
            "ckpt/aggregator/records/replica_set.py",
        ),
        (
            "tests/unit/storage/test_register_rules.py",
            "tests/unit/aggregator/test_replica_sets.py",
            "tests/faults/races/test_record_change_model.py",
            "tests/unit/aggregator/test_consensus.py",
            "tests/contracts/test_registers.py",
        ),
    ),
    "lease": Subject(
        tuple(f"ckpt/repository/{name}.py" for name in ("writer_lease", "lease_records", "group_lease")),
        tuple(
            f"tests/unit/ckpt/repository/test_{name}.py"
            for name in ("writer_lease", "lease_takeover", "lease_records", "group_lease")
        ),
    ),
    "commit": Subject(
        (
            "ckpt/repository/commit_publication.py",
            "ckpt/repository/completeness.py",
            "ckpt/saving/committer.py",
            "ckpt/saving/tiling_check.py",
        ),
        (
            "tests/unit/ckpt/repository/test_commit_publication.py",
            "tests/unit/ckpt/repository/test_failed_publication.py",
            "tests/unit/ckpt/repository/test_completeness.py",
            "tests/unit/ckpt/saving/test_committer.py",
            "tests/unit/ckpt/saving/test_group_commit.py",
            "tests/unit/ckpt/saving/test_discarded_attempts.py",
            "tests/unit/ckpt/saving/test_tiling_check.py",
        ),
    ),
    "retention": Subject(
        ("ckpt/repository/retention.py", "ckpt/repository/permanent_steps.py"),
        tuple(
            f"tests/unit/ckpt/repository/test_{name}.py"
            for name in ("expired_steps", "permanent_steps", "sweep", "sweep_of_expired_steps", "sweep_of_leftovers")
        ),
    ),
}


def in_own_processes() -> list[str]:
    """Return the prefix of a command, which gives its processes numbers of their own; an empty list if that is not possible.

    mutmut 3.8 sends SIGXCPU to the number of each process after its time limit, also if it has ended. By then, another process
    of the host may have this number.
    """
    for user in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *user, "--pid", "--fork", "--mount-proc", "--kill-child"]
        if shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
            return command
    print("mutmut may end other processes of this host: there is no unshare(1), or it is not permitted", file=sys.stderr)
    return []


def changed_rules(subject: Subject, folder: Path) -> tuple[int, list[str]]:
    """Return how many changes the tests of a subject notice, and the names of the others."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "site"), str(ROOT)]
    subprocess.run(install, check=True)
    (folder / "site" / "ckpt").rename(folder / "ckpt")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pyproject.toml").write_text(
        f"{(ROOT / 'pyproject.toml').read_text()}\n"  # pytest finds its options there
        f"[tool.mutmut]\npaths_to_mutate = {[*subject.files]}\ntests_dir = {[*subject.tests]}\n"
        'also_copy = ["ckpt", "tests"]\n'
    )
    mutmut = [sys.executable, "-m", "mutmut"]
    done = subprocess.run([*in_own_processes(), *mutmut, "run"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"mutmut failed: {(done.stdout + done.stderr)[-2_000:]}")
    results = subprocess.run([*mutmut, "results", "--all", "true"], cwd=folder, capture_output=True, text=True, check=True)
    found = dict(re.findall(r"^\s+(\S+): (.+)$", results.stdout, re.MULTILINE))
    unnoticed = [name for name, outcome in found.items() if outcome not in NOTICED]
    for name in unnoticed:
        shown = subprocess.run([*mutmut, "show", name], cwd=folder, capture_output=True, text=True, check=True)
        print(name, *(line for line in shown.stdout.splitlines() if re.match(r"[-+] ", line)), sep="\n  ")
    return len(found) - len(unnoticed), unnoticed


def main() -> None:
    """Run the subjects that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=" ".join(SUBJECTS))
    names = parser.parse_args().subjects or [*SUBJECTS]
    if unknown := {*names} - {*SUBJECTS}:
        parser.error(f"no such subject: {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    shares = {}
    for name in names:
        print(f"{name}: this takes some minutes …", flush=True)
        with tempfile.TemporaryDirectory(prefix="ckpt-mutation-") as folder:
            noticed, unnoticed = changed_rules(SUBJECTS[name], Path(folder))
        count = noticed + len(unnoticed)
        shares[name] = noticed / count
        print(f"{name}: the tests notice {noticed} of {count} changes, {noticed / count:.1%}", flush=True)
    sys.exit(any(share < LEAST for share in shares.values()))


if __name__ == "__main__":
    main()
