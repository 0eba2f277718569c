"""The hooks of `ckpt-run --adapt` act once a module is imported, however often somebody looks for it before."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ckpt.adapters.adapt.startup import hooks

START = """
import importlib, importlib.util, sys, threading
sys.path[:0] = sys.argv[2:]
spec = importlib.util.spec_from_file_location("hooks", sys.argv[1])
hooks = sys.modules["hooks"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)
hooks.install()
"""
NAME = "keras.src.models.model"
CHECK = """
import keras.src.models.model as model
print("adapted", hasattr(model.Model.fit, "__wrapped__"), model.Model.fit(), "exec_module" in vars(model.__loader__))
"""
PROBES = {
    "none": "",
    "once": f"importlib.util.find_spec({NAME!r})",
    "twice": f"importlib.util.find_spec({NAME!r})\nimportlib.util.find_spec({NAME!r})",
    "of a finder that searches again": f"""
class Again:
    def find_spec(self, name, path=None, target=None):
        if name == {NAME!r} and not getattr(self, "runs", False):
            self.runs = True
            importlib.util.find_spec(name)
            self.runs = False

sys.meta_path.append(Again())
sys.meta_path.insert(0, Again())
importlib.util.find_spec({NAME!r})
""",
    "of a finder that always searches": f"""
class Again:
    def find_spec(self, name, path=None, target=None):
        if name == {NAME!r}:
            for finder in sys.meta_path:
                if finder is not self and (found := finder.find_spec(name, path, target)) is not None:
                    return found

sys.meta_path.insert(1, Again())
""",
    "imports in threads": """
threads = [threading.Thread(target=importlib.import_module, args=("keras.src.models.model",)) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
    "a failed import": """
import builtins
builtins.fails = True
try:
    import keras.src.models.model
except ImportError:
    builtins.fails = False
""",
}


def _framework(folder: Path) -> None:
    models = folder / "keras/src/models"
    models.mkdir(parents=True)
    for package in (models, models.parent, models.parent.parent):
        (package / "__init__.py").write_text("")
    (models / "model.py").write_text(
        "import builtins\nif getattr(builtins, 'fails', False):\n    raise ImportError\n"
        "class Model:\n    def fit(self=None):\n        return 'fitted'\n"
    )
    (models / "other.py").write_text("value = 7\n")


def _run(script: str, *path: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")}
    done = subprocess.run(
        [sys.executable, "-c", START + script, hooks.__file__, *map(str, path)], text=True, capture_output=True, timeout=600,
        env=variables | {"CKPT_ADAPT": "on"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("is_zip", [False, True])
def test_a_module_that_somebody_has_looked_for_is_adapted_once(tmp_path: Path, probe: str, is_zip: bool) -> None:
    _framework(tmp_path)
    path = tmp_path
    if is_zip:
        path = tmp_path / "keras.zip"
        with zipfile.ZipFile(path, "w") as file:
            for source in tmp_path.rglob("*.py"):
                file.write(source, source.relative_to(tmp_path))
    printed = _run(PROBES[probe] + "\nimport keras.src.models.other as other\nassert other.value == 7" + CHECK, path)
    assert printed == "adapted True fitted False\n"


def test_a_folder_with_the_name_of_a_framework_can_be_looked_for_and_imported(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    script = "print(importlib.util.find_spec('deepspeed').origin)\nimport deepspeed\nprint(deepspeed.__file__)"
    assert _run(script, tmp_path) == "None\nNone\n"


def test_a_call_without_free_descriptors_is_not_left_to_the_framework(tmp_path: Path) -> None:
    """The framework would find no checkpoint of its own, and start from the beginning."""
    _framework(tmp_path)
    script = """
import os, resource
hooks.start_process()
import keras.src.models.model as model
free = os.dup(0)
os.close(free)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
try:
    print(model.Model.fit())
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
"""
    assert _run(script, tmp_path) == "Too many open files\n"
