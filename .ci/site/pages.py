"""Generates the pages of the reference from the code: each page's path below docs/, and its text in Markdown."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]

OUTSIDE = {"SECURITY.md": "operations/security-policy.md", "CHANGELOG.md": "reference/changelog.md"}
"""Files of the repository that are pages of the site, too."""

COMMANDS = ("inspect", "restore", "import", "node", "mount", "run")
_MODULES = {"import": "import_step"}  # `import` is a keyword

API = {
    "saving": ("Save and load", "The two functions that most programs need, and what they return.",
               ["ckpt.save", "ckpt.load", "ckpt.open", "ckpt.SaveHandle"]),
    "checkpointer": ("The Checkpointer", "The object for a training loop.",
                     ["ckpt.Checkpointer", "ckpt.Keep", "ckpt.Tier", "ckpt.tiers.drain"]),
    "repository": ("Repositories and steps", "What `ckpt.open` returns: it lists steps, and reads parts of them.",
                   ["ckpt.Repository", "ckpt.Checkpoint", "ckpt.LazyArray", "ckpt.LeafInfo"]),
    "state": ("What a state may hold", "Wrappers that describe what a rank has.",
              ["ckpt.Shard", "ckpt.PerRank", "ckpt.RandomState", "ckpt.dtypes.numpy_dtype", "ckpt.dtypes.dtype_name"]),
    "training": ("Data and phases", "A data position that is saved, and marks for `ckpt-run`.",
                 ["ckpt.data.Loader", "ckpt.data.Stream", "ckpt.pulse.phase", "ckpt.pulse.compute"]),
    "groups": ("Groups of ranks", "What `group=` takes, besides groups of torch, jax and MPI.", ["ckpt.groups.Group"]),
    "adapters": ("Adapters", "Import the one that you need.",
                 ["ckpt.adapters.torch", "ckpt.adapters.dcp", "ckpt.adapters.transformers", "ckpt.adapters.peft",
                  "ckpt.adapters.accelerate", "ckpt.adapters.lightning", "ckpt.adapters.deepspeed", "ckpt.adapters.torchtitan",
                  "ckpt.adapters.torchtune",
                  "ckpt.adapters.megatron", "ckpt.adapters.keras", "ckpt.adapters.paddle", "ckpt.adapters.mindspore",
                  "ckpt.adapters.megatron_bridge", "ckpt.adapters.jax", "ckpt.adapters.orbax",
                  "ckpt.adapters.orbax_handler", "ckpt.adapters.tensorstore", "ckpt.adapters.weights", "ckpt.adapters.torchft",
                  "ckpt.adapters.verl", "ckpt.adapters.testing"]),
    "stores": ("Stores", "For a store of your own: the contract, and its tests.",
               ["ckpt.storage.base.store.Store", "ckpt.storage.testing.StoreContract"]),
}  # fmt: skip
"""For each page, its title, its first sentence, and the names that it documents."""

MEMBERS = {
    "ckpt.Repository": ["steps", "latest"],
    "ckpt.Checkpoint": ["leaves", "tree", "verify", "protection"],
    "ckpt.SaveHandle": ["result", "wait", "done"],
}
"""The methods that users call, of classes whose other methods serve the package itself."""


def all_pages() -> dict[str, str]:
    """Return the text of every generated page, by its path."""
    found = {f"reference/api/{name}.md": api_page(*parts) for name, parts in API.items()}
    found |= {f"reference/cli/ckpt-{name}.md": command_page(name) for name in COMMANDS}
    found["reference/errors.md"] = errors_page()
    for file, page in OUTSIDE.items():
        found[page] = outside_page(file, page)
    return found


def api_page(title: str, first: str, names: list[str]) -> str:
    """Return a page of names, for which mkdocstrings inserts the docstrings."""
    return f"# {title}\n\n{first}\n\n" + "\n".join(f"::: {name}\n{_options(name)}" for name in names)


def _options(name: str) -> str:
    members = MEMBERS.get(name)
    return f"    options:\n      members: {members}\n" if members else ""


def outside_page(file: str, page: str) -> str:
    """Return a file of the repository as a page, with its links relative to the folder of the page."""
    up = "../" * page.count("/")
    return re.sub(r"\]\(docs/", f"]({up}", (ROOT / file).read_text())


# --- commands --------------------------------------------------------------------------------------------------


def command_page(name: str) -> str:
    """Return a page with the `--help` of a command and of its subcommands."""
    module = importlib.import_module(f"ckpt.tools.{_MODULES.get(name, name)}")
    commands = {f"ckpt-{name}": next(c for c in vars(module).values() if getattr(c, "name", None) == f"ckpt-{name}")}
    commands |= {f"ckpt-{name} {other}": command for other, command in getattr(module, "_SUBCOMMANDS", {}).items()}
    text = [f"# ckpt-{name}\n", "What the command prints with `--help`.\n"]
    for title, command in commands.items():
        for path, help_text in _helps(title, command, None):
            text += [f"## {path}\n"] if " " in path else []
            text.append(f"```text\n{help_text}\n```\n")
    return "\n".join(text)


def _helps(name: str, command: click.Command, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """Yield the command line and the help of a command and of its subcommands."""
    context = click.Context(command, info_name=name, parent=parent, max_content_width=100, terminal_width=100)
    yield context.command_path, command.get_help(context).rstrip()
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from _helps(inner, command.commands[inner], context)


# --- errors ----------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Return a page with CkptError and its subclasses as a tree, each with its docstring."""
    import ckpt
    from ckpt import errors

    rows = []

    def show(kind: type[ckpt.CkptError], depth: int) -> None:
        where = next(module for module in (ckpt, errors, sys.modules[kind.__module__]) if hasattr(module, kind.__name__))
        name = f"{where.__name__}.{kind.__name__}"
        also = [base.__name__ for base in kind.__bases__ if not issubclass(base, ckpt.CkptError)]
        doc = " ".join((kind.__doc__ or "").split())
        rows.append(f"| {'&emsp;' * depth}`{name}` | {doc} | {', '.join(f'`{b}`' for b in also if b != 'Exception')} |")
        for inner in sorted(kind.__subclasses__(), key=lambda k: k.__name__):
            if inner.__module__.startswith("ckpt.") and inner.__module__.endswith(".errors"):
                show(inner, depth + 1)

    show(ckpt.CkptError, 0)
    return _ERRORS + "\n".join(rows) + "\n"


_ERRORS = """# Errors

All errors that ckpt raises on purpose are in one tree. `except ckpt.CkptError` catches them and nothing else. A message says
what happened, where, and what to do next. The cause is chained. An indented class is a subclass of the class above it.

| error | meaning | also a |
|---|---|---|
"""
