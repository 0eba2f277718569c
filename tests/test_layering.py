"""Imports go downwards only, and `import ckpt` stays light."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
import map as code_map  # noqa: E402
import parts  # noqa: E402

LAYERS = tuple(parts.FOLDERS)  # each may import itself and those before it
HEAVY = {"torch", "jax", "mpi4py", "obstore", "h5py", "zarr", "pyarrow", "numcodecs"}
FRAMEWORK_FILES = {
    "ckpt/format/float_planes.py": "numcodecs",
    "ckpt/state/leaves/torch.py": "torch",
    "ckpt/state/leaves/torch_streams.py": "torch",
    "ckpt/state/leaves/dtensor.py": "torch",
    "ckpt/state/leaves/jax.py": "jax",
    "ckpt/state/leaves/jax_objects.py": "jax",
    "ckpt/adapters/accelerate_data.py": "torch",
    "ckpt/adapters/accelerate_hooks.py": "torch",
    "ckpt/adapters/torch.py": "torch",
    "ckpt/adapters/served_step.py": "torch",
    "ckpt/adapters/sglang_loader.py": "torch",
    "ckpt/adapters/megatron.py": "torch",
    "ckpt/adapters/megatron_bridge.py": "torch",
    "ckpt/adapters/megatron_state.py": "torch",
    "ckpt/adapters/megatron_tracker.py": "torch",
    "ckpt/adapters/megatron_values.py": "torch",
    "ckpt/adapters/torchtitan_state.py": "torch",
    "ckpt/adapters/torchft.py": "torch",
    "ckpt/adapters/transformers_data.py": "torch",
    "ckpt/adapters/verl.py": "torch",
    "ckpt/adapters/vllm.py": "torch",
    "ckpt/adapters/weights.py": "torch",
    "ckpt/adapters/dcp.py": "torch",
    "ckpt/adapters/jax.py": "jax",
    "storage/node/wire.py": "pyarrow",
    "storage/node/client.py": "pyarrow",
    "storage/node/forked_connections.py": "pyarrow",
    "storage/node/server.py": "pyarrow",
    "storage/node/token_check.py": "pyarrow",
    "storage/node/message_digests.py": "pyarrow",
}
"""Files that are imported only where the framework is imported already."""

PUBLIC_NAMES = {
    "AlreadyExists", "Checkpoint", "Checkpointer", "CkptError", "Fenced", "FormatError", "GroupError", "IntegrityError",
    "InvalidArgument", "InvalidName", "Keep", "LazyArray", "LeafInfo", "LeafMismatch", "LeafNotFound", "NotFinite",
    "NotFound", "PerRank", "RandomState", "RanksMissing", "Repository", "RepositoryBusy", "SaveFailed", "SaveHandle", "Shard",
    "SignatureError", "StagingFailed", "StateChanged", "StepNotFound", "StepRefused", "StepSkipped", "StoreError", "Tier",
    "UnknownScheme", "UnsupportedLeaf", "__version__", "data", "load", "open", "pulse", "save",
}  # fmt: skip

MODULES = sorted(str(file.relative_to(ROOT)) for layer in LAYERS for file in (ROOT / layer).rglob("*.py"))


def installed_name(module: str) -> str:
    """Return the name of a module once it is installed: of `storage/base/store.py` it is `ckpt.storage.base.store`."""
    parts = list(Path(module).with_suffix("").parts)
    if parts[0] != "ckpt":
        parts.insert(0, "ckpt")
    return ".".join(parts)


def imported(statement: ast.stmt, module: str) -> Iterator[str]:
    """Yield the full names that a statement imports; for `from a import b` it is a.b, as b may be a module."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        base = statement.module or ""
        if statement.level:
            above = installed_name(module).removesuffix(".__init__").split(".")
            up = statement.level - module.endswith("__init__.py")
            base = ".".join([*above[: len(above) - up], *([base] if base else [])])
        yield from (f"{base}.{alias.name}" for alias in statement.names)


def layer_of(name: str) -> str | None:
    """Return the layer of an imported name, or None if it is not a module of ckpt."""
    top, _, rest = name.partition(".")
    if top != "ckpt":
        return None
    second = rest.partition(".")[0]
    return second if second in LAYERS else "ckpt"


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported; not those in functions or under TYPE_CHECKING."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from at_import(statement.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from at_import(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from at_import(handler.body)


def test_every_layer_has_modules():
    assert {Path(module).parts[0] for module in MODULES} == set(LAYERS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards_only(module: str):
    allowed = LAYERS[: LAYERS.index(Path(module).parts[0]) + 1]
    nodes = ast.walk(ast.parse((ROOT / module).read_text()))
    names = [name for node in nodes if isinstance(node, ast.stmt) for name in imported(node, module)]
    wrong = [name for name in names if (layer := layer_of(name)) is not None and layer not in allowed]
    assert not wrong, f"{module} may import only from {', '.join(allowed)}"
    by_folder = [name for name in names if name.split(".")[0] in set(LAYERS) - {"ckpt"}]
    assert not by_folder, f"{module}: write ckpt.storage, not storage, which an installed package does not have"


@pytest.mark.parametrize("module", sorted(parts.modules()))
def test_a_file_imports_only_folders_that_the_table_allows(module: str):
    """The table is docs/design/parts.toml. A file that no entry of it contains fails here, too."""
    assert parts.forbidden(module) == []


def test_folders_import_each_other_without_a_cycle():
    assert code_map.cycles(code_map.part_edges()) == []


def test_imports_between_folders_of_ckpt_are_few():
    edges = code_map.part_edges("ckpt")
    assert code_map.cycles(edges) == []
    assert sum(map(len, edges.values())) <= 110
    assert code_map.depth(edges) <= 12


def files_outside_packages() -> list[Path]:
    """Return all files of the project that are not installed."""
    found = [path for folder in ("benchmarks", "examples", "tests", ".ci") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(found) > 400
    return found


def test_functions_are_short():
    """The lines of a docstring don't count: some document each argument."""
    others = {str(path.relative_to(ROOT)): path for path in files_outside_packages()}
    found = code_map.functions(parts.modules() | others)
    assert [(name, lines) for name, lines, _ in found if lines > code_map.FUNCTION_LINES] == []


def test_functions_that_are_not_public_have_few_arguments():
    public = {"ckpt.api.save", "ckpt.api.load", "ckpt.checkpointer.__init__"}
    assert {name for name, _, arguments in code_map.functions(parts.modules()) if arguments > code_map.ARGUMENTS} <= public


@pytest.mark.parametrize("module", MODULES)
def test_calls_with_many_values_name_them(module: str):
    """Of more than seven values by position, a reader does not see which is which. A call that forwards *arguments is free."""
    calls = [node for node in ast.walk(ast.parse((ROOT / module).read_text())) if isinstance(node, ast.Call)]
    calls = [call for call in calls if not ast.unparse(call.func).startswith("log.")]
    wrong = [node.lineno for node in calls if len(node.args) > 7 and not any(isinstance(a, ast.Starred) for a in node.args)]
    assert wrong == []


def test_the_map_in_the_documentation_names_every_file():
    assert code_map.PAGE.read_text() == code_map.page_of_files(), "run make map-docs"


def test_the_table_of_layers_is_that_of_the_parts():
    page = code_map.page_of_architecture()
    assert code_map.ARCHITECTURE.read_text() == page, "run make map-docs"
    assert re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE) == [*reversed(LAYERS)]


def test_a_folder_that_is_in_one_table_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "parts.toml").write_text(parts.TABLE.read_text().replace('name = "tools"', 'name = "toolbox"'))
    monkeypatch.setattr(parts, "TABLE", tmp_path / "parts.toml")
    with pytest.raises(ValueError, match="differ: toolbox, tools"):
        parts._folders()


@pytest.mark.parametrize("text", ["from . import errors", "from .errors import CkptError", "from ..state import tree"])
def test_relative_imports_are_refused(text: str):
    with pytest.raises(ValueError, match="write the full name"):
        list(parts._targets(ast.parse(text).body[0], parts.modules()))


def test_files_that_the_docstring_of_a_package_names_exist():
    """A name in code style is that of a file, a folder or a definition of the project."""
    trees = {path: ast.parse(path.read_text()) for path in parts.modules().values()}
    known = {path.stem for path in trees} | {path.parent.name for path in trees} | set(LAYERS)
    known |= {
        node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    for path, tree in trees.items():
        if path.name == "__init__.py":
            words = re.findall(r"`([\w.]+)`", ast.get_docstring(tree) or "")
            names = [name.removesuffix(".py") for name in words]
            assert [name for name in names if not set(name.split(".")) <= known | {"ckpt", "sitecustomize"}] == [], path


def test_a_file_of_more_than_400_lines_begins_with_the_reason():
    """The first line of its docstring has the word long, or the reason for one file."""
    for path in [*parts.modules().values(), *files_outside_packages()]:
        text = path.read_text()
        if text.count("\n") > code_map.FILE_LINES:
            assert re.search(r"\blong\b|\bone file\b", text.partition("\n")[0]), path


def test_public_names_stay_importable():
    code = """
import ckpt, ckpt.adapters.dcp, ckpt.adapters.jax, ckpt.adapters.torch
from ckpt import data, pulse
from ckpt.data import Loader, Stream
from ckpt.dtypes import dtype_name, numpy_dtype
from ckpt.groups import Group
from ckpt.pulse import compute, phase
from ckpt.storage.base import Entry, Reader, Store, Writer
from ckpt.storage.testing import StoreContract
from ckpt.tiers import drain
assert callable(ckpt.save) and callable(ckpt.load) and callable(ckpt.open)
assert all(hasattr(ckpt, name) for name in ckpt.__all__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(ckpt.__all__) == PUBLIC_NAMES


def test_commands_and_plugins_are_defined():
    """Read from the sources, as some of their modules import a framework."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = [target for group in (project["scripts"], *project["entry-points"].values()) for target in group.values()]
    assert len(targets) > 10
    for module, _, name in (target.partition(":") for target in targets):
        body = ast.parse(parts.modules()[module].read_text()).body
        assert name in {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}, module


@pytest.mark.parametrize("module", MODULES)
def test_heavy_packages_are_imported_where_they_are_used(module: str):
    statements = at_import(ast.parse((ROOT / module).read_text()).body)
    packages = {name.split(".")[0] for statement in statements for name in imported(statement, module)}
    assert packages & HEAVY <= {FRAMEWORK_FILES.get(module)}, f"{module}: import them in the function that needs them"


def test_import_ckpt_is_light():
    code = "import ckpt, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "ckpt" in loaded
    assert not {"numpy", "torch", "jax", "pyarrow", "numcodecs", "obstore", "fsspec", "mpi4py", "h5py", "zarr"} & set(loaded)


def test_ckpt_run_starts_without_packages_that_it_seldom_needs() -> None:
    """Half of the processor time of its start was numpy, for a drain of memory, and rich, for progress bars."""
    code = "import sys, ckpt.tools.run, ckpt.recovery.agent.agent; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"numpy", "rich", "email", "pyarrow"} & set(loaded) == set()


def test_names_are_imported_from_where_type_checkers_find_them():
    tree = ast.parse((ROOT / "ckpt/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names if node.module != "ckpt"}
    modules = {alias.name for node in imports for alias in node.names if node.module == "ckpt"}
    assert seen == ckpt._MODULE_OF
    assert {*seen, *modules, "__version__"} - {"dtypes"} == set(ckpt.__all__)
    assert {*ckpt.__all__} <= {*dir(ckpt)}
    with pytest.raises(AttributeError, match="module 'ckpt' has no attribute 'nothing'"):
        ckpt.nothing  # noqa: B018


def test_saving_and_loading_import_only_what_they_need(tmp_path: Path):
    """Arrow imports pandas for many of its calls if it is installed."""
    code = """
import sys, ckpt, numpy as np
state = {"weight": np.arange(1 << 22), "flags": [np.zeros(3), None], "empty": np.zeros((0, 4)), "step": 3}
for step in range(2):
    ckpt.save(state, sys.argv[1], step=step, codec=None)
    state["weight"][:9] += 1
loaded = ckpt.load(sys.argv[1], only="weight")
ckpt.load(sys.argv[1], state)
assert state["weight"][0] == loaded["weight"][0] == 1
print(*sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "r"], check=True, capture_output=True, text=True)
    loaded = ran.stdout.split()
    assert_light(loaded)


def test_ranks_import_only_what_they_need(tmp_path: Path):
    """The code covers parts, their merge with a replica stored by both ranks, and a load into another layout."""
    code = """
import sys, ckpt, numpy as np
from concurrent.futures import ThreadPoolExecutor
from ckpt.groups.threads import ThreadGroup
whole = np.arange(1 << 20).reshape(1024, 1024)
def rank(group):
    half = slice(512 * group.rank, 512 * group.rank + 512)
    state = {"cut": ckpt.Shard(whole[half], whole.shape, (half.start, 0)), "copy": ckpt.Shard(+whole, whole.shape, (0, 0))}
    ckpt.save(state, sys.argv[1], step=1, group=group)
    columns = np.zeros((1024, 512), int)
    ckpt.load(sys.argv[1], {"cut": ckpt.Shard(columns, whole.shape, (0, half.start))}, only="cut", group=group)
    assert (columns == whole[:, half]).all()
with ThreadPoolExecutor(2) as pool:
    list(pool.map(rank, ThreadGroup.make(2)))
print(*sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "r"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert_light(ran.stdout.split())


def assert_light(loaded: list[str]) -> None:
    assert {"ckpt", "pyarrow"} <= set(loaded)
    assert all(map(importlib.util.find_spec, ("pandas", "numcodecs")))
    assert not {"pandas", "pyarrow.compute", "numcodecs", "torch", "jax"} & set(loaded)
