"""The names of the folders of a repository, of the folder of a step, and of its commit record."""

from __future__ import annotations

from ckpt.groups.store_rendezvous import RENDEZVOUS_FOLDER

STEPS_FOLDER = "steps"

COMMIT_FILE = "commit.json"
"""The name of the commit record in the folder of its step."""

FOLDERS = (STEPS_FOLDER, "generations", "lines", RENDEZVOUS_FOLDER)
"""The folders of a repository. All other folders at its URL belong to someone else, such as another repository."""


def step_folder(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"{STEPS_FOLDER}/{step}"


def commit_name(step: int) -> str:
    """Return the name of the commit record of a step, which makes the step exist."""
    return f"{step_folder(step)}/{COMMIT_FILE}"


def is_commit_name(name: str) -> bool:
    """Return whether a file in the folder of a step is its commit record."""
    return name.endswith(f"/{COMMIT_FILE}")
