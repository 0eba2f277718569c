"""The command ckpt-inspect: lists the steps of a repository or the arrays of a step, and verifies them."""

from __future__ import annotations

import dataclasses

import click

import ckpt
from ckpt.api import check_step
from ckpt.repository.repository import Repository
from ckpt.state.rank_tree import own_name
from ckpt.storage.base.plural import format_count
from ckpt.tools import common, verify_subset
from ckpt.tools.common import emit
from ckpt.tools.step_contents import Contents, read_contents
from ckpt.tools.step_display import leaf_json, show_problems, show_step, show_steps, sort_by_age, step_json
from ckpt.tools.step_health import LeafReport, StepReport, report_leaves, step_reports
from ckpt.tools.verify import exit_status, verify_next_part, verify_step, verify_steps, with_error


@click.command(
    "ckpt-inspect",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  ckpt-inspect runs/a                      all steps of the repository in the folder runs/a
  ckpt-inspect s3://bucket/run 1000        every array of step 1000
  ckpt-inspect runs/a 1000 --only 'model.*'
  ckpt-inspect runs/a --verify             read every byte of every step and check it
  ckpt-inspect runs/a --verify --subset 5% read a twentieth, the next one each time
  ckpt-inspect runs/a --json | jq '.steps[-1].step'

\b
State of a step:
  ok          committed, and all its files exist with the right length
  incomplete  committed, but files are missing or have another length
  damaged     a record or (found with --verify) data differs from what was written
  unreadable  its files can't be read now (permission, network), or a newer version wrote them
  unfinished  no commit record: a save still runs, or a save or a deletion was interrupted

\b
After a roll-back the steps are shown in the order in which they were saved, with their training line:
  abandoned   saved after the step that the roll-back restored; `keep` deletes it first
  set aside   of an earlier run, which this one did not restore; `keep` does not delete it

Exit status: 0 all committed steps are good, 1 one is damaged or can't be read, 2 wrong usage.""",
)
@click.argument("url")
@click.argument("step", type=int, required=False)
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Only leaves of this name or shell pattern, such as 'model.*'. Needs STEP. May be repeated.",
)
@click.option(
    "--verify",
    "verifying",
    is_flag=True,
    help="Read all bytes of the STEP, or of all steps, and check them against their digests.",
)
@click.option(
    "--subset",
    "share",
    type=verify_subset.Percent(),
    metavar="N%",
    help="With --verify: read about this share of the stored bytes, from where the last such run ended. The position is stored "
    "in $XDG_STATE_HOME/ckpt (~/.local/state/ckpt).",
)
@common.key_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.version_option(ckpt.__version__, package_name="ckpt-store")
def command(
    url: str, step: int | None, only: tuple[str, ...], verifying: bool, share: float | None, key_file: str | None, as_json: bool
) -> int:
    """Show the steps of the checkpoint repository at URL, or the arrays of one STEP.

    URL is a folder, or any URL that ckpt.save accepts (s3://bucket/run …). Nothing is changed. Without --verify, only the small
    records are read and the files are listed, so this is fast even for large steps.
    """
    if step is None and only:
        raise click.UsageError("--only chooses leaves of one step: give the STEP, too")
    if share is not None and (only or not verifying):
        raise click.UsageError("--subset needs --verify, and can't be used with --only")
    repo = ckpt.open(url, key=key_file)
    if share is not None:
        return verify_next_part(repo, step, share, as_json)
    if step is None:
        return _inspect_all_steps(repo, verifying, as_json)
    (report,) = step_reports(repo, [check_step(step)]) or [StepReport(step, "unfinished", None)]
    if report.state == "unfinished" and step not in repo.step_numbers():
        repo.commit(step)  # raises StepNotFound, which names the existing steps
    return _inspect_one_step(repo, report, only, verifying, as_json)


def main() -> None:
    """Run the command as a console script."""
    common.run(command)


# --- all steps -------------------------------------------------------------------------------------------------


def _inspect_all_steps(repo: Repository, verifying: bool, as_json: bool) -> int:
    reports, order = sort_by_age(repo, step_reports(repo, repo.step_numbers()))
    if verifying:
        reports = list(verify_steps(repo, reports, as_json))
    failed = sum(r.has_failed for r in reports)
    if as_json:
        common.emit_json({"url": repo.url, "ok": not failed, "steps": [step_json(repo, r, order, verifying) for r in reports]})
        return exit_status(reports)
    if not verifying and reports:
        show_steps(reports, order)
        for report in reports:
            show_problems(report)
    emit(f"{format_count(len(reports), 'step')} in {repo.url}" + (f", {failed} of them not ok" if failed else ""))
    return exit_status(reports)


# --- one step --------------------------------------------------------------------------------------------------


def _inspect_one_step(repo: Repository, report: StepReport, only: tuple[str, ...], verifying: bool, as_json: bool) -> int:
    chosen: Contents | None = None
    leaves: list[LeafReport] = []
    if report.commit is not None:
        checkpoint = repo.checkpoint(report.commit)
        try:
            reports_by_leaf = report_leaves(checkpoint, report.bad_files)
            chosen = read_contents(checkpoint, only)
            leaves = [dataclasses.replace(reports_by_leaf[a.leaf], name=a.name) for a in chosen.arrays]
        except ckpt.IntegrityError as error:
            report = with_error(report, error)
    if verifying and chosen is not None:
        own = [own_name(a.leaf, rank) for a in chosen.arrays for rank in chosen.own_ranks.get(a.name, ())]
        report = verify_step(repo, report, [*(a.leaf for a in chosen.arrays), *own] if only else None, as_json)
    if as_json:
        result = {"url": repo.url, **step_json(repo, report, None, verifying)}
        if chosen is not None:
            result["leaves"] = [leaf_json(leaf) for leaf in leaves]
            result |= {"plain_values": len(chosen.values), "tied": chosen.tied, "own_ranks": chosen.own_ranks}
        common.emit_json(result)
    elif not (verifying and chosen is not None):
        show_step(repo, report, chosen, leaves)
    return int(report.state != "ok")


if __name__ == "__main__":
    main()
