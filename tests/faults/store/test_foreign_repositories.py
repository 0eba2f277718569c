"""Repositories of a newer version, forged ones, and those of a missing framework are refused in one line, and run no code."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drifting_states import drifting_state
from helpers.forged_manifests import change_column, replace_file
from helpers.messages import one_line
from helpers.processes import finish, python
from helpers.refusal import refused
from helpers.refusal import root as root
from helpers.states import assert_same, state_of

import ckpt
from ckpt.format import codec, json_records
from ckpt.format.json_records import StepFile
from ckpt.storage.base.errors import Refused, StoreError, Unavailable
from ckpt.storage.local.directory import LocalStore
from ckpt.tools.inspect import command as inspect_command


def test_a_repository_of_a_newer_format_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_records, "FORMAT_VERSION", 2)
    data = json_records.encode("repository", {"id": "x", "new": [1]})
    monkeypatch.undo()
    (root / "ckpt.json").write_bytes(data)
    for call in (
        lambda: ckpt.load(root), lambda: ckpt.load(root, step=4), lambda: ckpt.open(root),
        lambda: ckpt.save(state_of(5), root, 5), lambda: ckpt.Checkpointer(root),
    ):  # fmt: skip
        with refused(ckpt.FormatError, "format version 2", "up to 1", "install a newer", root=root):
            call()


def test_a_step_of_a_newer_format_is_refused_and_not_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load does not fall back to an older step, as for a damaged one."""
    path = root / "steps/4/commit.json"
    body = json.loads(path.read_bytes())
    monkeypatch.setattr(json_records, "FORMAT_VERSION", 2)
    path.write_bytes(json_records.encode("commit", {k: v for k, v in body.items() if k not in ("digest", "kind", "format")}))
    monkeypatch.undo()
    for call in (lambda: ckpt.load(root), lambda: ckpt.load(root, step=4)):
        with refused(ckpt.FormatError, "steps/4/commit.json", "version 2", "install a newer", root=root):
            call()
    assert_same(ckpt.load(root, step=3), state_of(3))
    # A version that cannot read the step never deletes it.
    ckpt.save(state_of(5), root, 5, keep=1)
    assert path.exists()


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("codec", '{"id": "pickle"}', ("pickle", "not used")),
        ("codec", '{"id": "json2"}', ("json2", "not used")),
        ("codec", "nonsense", ("not understood",)),
        ("pack", "../../../../etc/passwd", ("not a valid",)),
        ("pack", "/etc/passwd", ("not a valid",)),
        ("pack", "steps/4/pack/nothing.pack", ("missing",)),
        ("position", 1 << 40, ("early",)),
        ("dtype", "nonsense", ("nonsense",)),
        ("dtype", "object", ("object",)),
    ],
)
def test_a_forged_manifest_is_refused_and_runs_no_code(root: Path, column: str, value: Any, words: tuple[str, ...]) -> None:
    """Digests prove that nothing was changed by accident; an attacker who forges the digests, too, still runs no code."""
    ckpt.save({"w": np.zeros(50_000)}, root, 4, codec={"id": "zlib", "level": 1}, overwrite=True)
    replace_file(root, 4, change_column(column, value), ".parquet")
    with refused(ckpt.CkptError, *words, root=root):
        ckpt.load(root, step=4)
    with refused(ckpt.CkptError, *words, root=root):
        ckpt.load(root, {"w": np.zeros(50_000)}, step=4)


@pytest.mark.parametrize(
    "tree",
    [
        "not json", "[]", "{}", '{"tree": {}}', '{"format": 1, "tree": {"unknown": 1}}',
        '{"format": 1, "tree": {"array": "nothing", "kind": "numpy"}}',
        '{"format": 1, "tree": {"array": "embed", "kind": "nonsense"}}', '{"format": 1, "tree": ' + "[" * 5000,
    ],
)  # fmt: skip
def test_a_forged_state_tree_is_refused(root: Path, tree: str) -> None:
    replace_file(root, 4, lambda _: tree.encode(), ".json")
    with refused(ckpt.CkptError, root=root):
        ckpt.load(root, step=4)
    with refused(ckpt.CkptError, root=root):
        ckpt.load(root, step=4, only="embed")
    with refused(ckpt.CkptError, root=root):
        ckpt.load(root, state_of(0), step=4)


@pytest.mark.parametrize(
    "change",
    [
        {"trees": ()}, {"packs": (StepFile("x", 4096),)}, {"packs": (StepFile("steps/x/pack/0-1-0-0.pack", 4096),)},
        {"packs": (StepFile("steps/4/../x", 4096),)}, {"manifests": (StepFile("../x", 9, "0" * 32),)},
        {"trees": (StepFile("../../etc/passwd", 9, "0" * 32),)},
    ],
)  # fmt: skip
def test_a_record_with_files_that_no_step_has_counts_as_damaged(root: Path, change: dict[str, Any]) -> None:
    path = root / "steps/4/commit.json"
    commit = json_records.decode_commit(path.read_bytes(), "")
    path.write_bytes(json_records.encode_commit(dataclasses.replace(commit, **change)))
    for call in (lambda: ckpt.load(root, step=4), lambda: ckpt.open(root)[4].verify()):
        with refused(ckpt.IntegrityError, "step", root=root):
            call()
    with pytest.warns(UserWarning, match="step 4 is damaged"):
        assert_same(ckpt.load(root), state_of(3))
    assert inspect_command.main([str(root), "4", "--verify"], standalone_mode=False) == 1
    ckpt.save(state_of(5), root, 5, keep=1)
    assert_same(ckpt.load(root), state_of(5))


@pytest.mark.parametrize("pack", ["x", "steps/x/pack/y", "steps/4/../../x", "", "../../etc/passwd"])
@pytest.mark.parametrize("column", ["pack", "base_pack"])
def test_a_manifest_with_blocks_in_a_file_that_no_step_has_counts_as_damaged(tmp_path: Path, column: str, pack: str) -> None:
    for step in (3, 4):
        ckpt.save(drifting_state(step), tmp_path, step, full_every=10)
    replace_file(tmp_path, 4, change_column(column, pack), ".parquet")
    checkpoint = ckpt.open(tmp_path)[4]
    for call in (lambda: ckpt.load(tmp_path, step=4), checkpoint.verify, lambda: checkpoint["weights"][3]):
        with refused(ckpt.IntegrityError, "step", root=tmp_path):
            call()
    assert inspect_command.main([str(tmp_path), "4"], standalone_mode=False) == 1
    with pytest.warns(UserWarning, match="step 4 is damaged"):
        assert_same(ckpt.load(tmp_path), drifting_state(3))


def as_newer_manifest(data: bytes) -> bytes:
    """Return the manifest with a newer format version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(pa.BufferReader(data))
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"format": b"3"}), sink)
    return sink.getvalue()


def as_newer_tree(data: bytes) -> bytes:
    """Return the state tree with a newer format version."""
    return json.dumps({**json.loads(data), "format": 2}).encode()


def test_a_load_without_a_whole_step_names_all_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error names all steps, and the log the damage of each."""
    root = tmp_path / "r"
    for step in (3, 5, 9):
        ckpt.save(state_of(step), root, step)
        next(root.glob(f"steps/{step}/pack/*")).write_bytes(b"")
    with refused(ckpt.IntegrityError, "every step of", "is damaged (steps 3, 5, 9)", "of step 9", root=root):
        ckpt.load(root)
    for step in (3, 5):
        assert f"of step {step} of {root.as_uri()}" in caplog.text
    with ckpt.Checkpointer(root) as saver, refused(ckpt.IntegrityError, "every step of", "is damaged (steps 3, 5, 9)"):
        saver.restore(state_of(0))


@pytest.mark.parametrize(("change", "suffix"), [(as_newer_manifest, ".parquet"), (as_newer_tree, ".json")])
def test_a_step_with_a_file_of_a_newer_format_is_refused_and_kept(
    root: Path, change: Callable[[bytes], bytes], suffix: str
) -> None:
    """The file is neither guessed at nor skipped, and the step is never replaced."""
    replace_file(root, 4, change, suffix)
    for call in (lambda: ckpt.load(root), lambda: ckpt.load(root, state_of(0), step=4)):
        with refused(ckpt.FormatError, "steps/4/", suffix, "has format version", "install a newer", root=root):
            call()
    if suffix == ".parquet":
        with pytest.raises(ckpt.FormatError):
            ckpt.save(state_of(5), root, 4)
    assert_same(ckpt.load(root, step=3), state_of(3))


@pytest.mark.parametrize("kind", [Refused, Unavailable])
def test_a_step_that_is_unreadable_for_now_is_not_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: type[StoreError]
) -> None:
    """It may be whole: without overwrite=True only a step that is certainly damaged is replaced."""
    get_up_to = LocalStore.get_up_to

    def failing(store: LocalStore, name: str, limit: int) -> bytes:
        if name.startswith("steps/4/manifest/"):
            raise kind(f"opening {name} failed")
        return get_up_to(store, name, limit)

    monkeypatch.setattr(LocalStore, "get_up_to", failing)
    with pytest.raises(kind, match="steps/4/manifest"):
        ckpt.save(state_of(9), root, 4)
    monkeypatch.undo()
    assert_same(ckpt.load(root, step=4), state_of(4))


def test_a_state_tree_that_names_code_runs_none(root: Path) -> None:
    """A class is used only if its fields equal the saved ones; a function is never used."""
    tree = {
        "dict": [
            ["a", {"namedtuple": ["exit 1"], "class": "os:system", "fields": ["command"]}],
            ["b", {"dataclass": ["x"], "class": "subprocess:Popen", "fields": ["args"]}],
            ["c", {"object": {"dict": []}, "class": "antigravity:anything"}],
        ]
    }
    replace_file(root, 4, lambda _: json.dumps({"format": 1, "tree": tree}).encode(), ".json")
    got = ckpt.load(root, step=4)
    assert got["a"].command == "exit 1"
    assert got["b"].args == "x"
    assert type(got["b"]).__module__ != "subprocess"
    assert "antigravity" not in sys.modules


def test_the_pickle_codec_is_refused_by_name() -> None:
    with refused(ckpt.FormatError, "pickle"):
        codec.decode('{"id": "pickle"}', memoryview(b"cos\nsystem\n(S'false'\ntR."), np.empty(8, np.uint8))


def test_a_step_of_a_missing_framework_loads_only_into_targets(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ckpt.save({"w": torch.arange(3.0)}, tmp_path / "run", 0)
    code = """
import sys
sys.modules["torch"] = None
import ckpt, numpy
like = {"w": numpy.zeros(3, "f4")}
print(ckpt.load(sys.argv[1], like)["w"].tolist())
try:
    ckpt.load(sys.argv[1])
except ckpt.CkptError as error:
    print(error)
"""
    filled, message = finish(python(code, tmp_path / "run")).splitlines()
    assert filled == "[0.0, 1.0, 2.0]"
    one_line(RuntimeError(message), "torch", "w", "like")
