"""An attacker with write access changes a step and all its digests: a load with a key finds the change."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.processes import finish, python
from helpers.repositories import snapshot

import ckpt
from ckpt.format import json_records
from ckpt.format.digest import digest, digest_and_cells
from ckpt.format.manifest import Row
from ckpt.format.manifest_parquet import read_table, write_table
from ckpt.groups.threads import ThreadGroup

pytest.importorskip("blake3")

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))


def state() -> dict[str, Any]:
    """Return a state with one leaf in a block of its own, of five cells."""
    return {"weight": np.arange(300_000, dtype=np.float32), "step": 5}


save = partial(ckpt.save, codec="none")  # otherwise the choice of a codec depends on the speed of the disk


def forge(root: Path, step: int, change: Callable[[bytearray], None], *, block_digests: bool = True) -> None:
    """Change the bytes of the first block of a step, and every digest that depends on them, as ckpt itself would write it.

    block_digests: False keeps the digest of the block, and changes only the checksums of its cells.
    """
    commit = json_records.decode_commit((root / f"steps/{step}/commit.json").read_bytes(), "commit")
    manifest = root / commit.manifests[0].name
    table = read_table(manifest.read_bytes(), "manifest")
    algorithm = pq.read_schema(manifest).metadata[b"digest"].decode()
    row: Row = ckpt.open(root)[step].manifest().rows[0]
    assert row.codec is None
    assert row.pack is not None
    pack = root / row.pack
    data = bytearray(pack.read_bytes())
    block = bytearray(data[row.position : row.position + row.stored])
    change(block)
    data[row.position : row.position + row.stored] = block
    pack.write_bytes(data)
    block_digest, cells = digest_and_cells(algorithm, memoryview(block))
    if not block_digests:
        block_digest = row.digest
    for name, value in (("digest", block_digest), ("cells", cells)):
        values = [value, *table.column(name).to_pylist()[1:]]
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.array(values, pa.binary()))
    metadata = {k.decode(): v.decode() for k, v in pq.read_schema(manifest).metadata.items() if k != b"ARROW:schema"}
    manifest.write_bytes(write_table(table, metadata))
    rewrite_commit(root, step)


def rewrite_commit(root: Path, step: int, **changes: Any) -> None:
    """Write the commit record again with the present digests of its files."""
    path = root / f"steps/{step}/commit.json"
    commit = json_records.decode_commit(path.read_bytes(), "commit")

    def present_record(file: json_records.StepFile) -> json_records.StepFile:
        data = (root / file.name).read_bytes()
        algorithm = "blake3" if file.digest is not None and len(file.digest) == 64 else "xxh3-128"
        return json_records.StepFile(file.name, len(data), digest(algorithm, data).hex())

    manifests, trees = (tuple(map(present_record, files)) for files in (commit.manifests, commit.trees))
    commit = dataclasses.replace(commit, manifests=manifests, trees=trees, **changes)
    path.write_bytes(json_records.encode_commit(commit))


def change_first_element(block: bytearray) -> None:
    """Write another first element."""
    block[:4] = np.float32(1e30).tobytes()


def test_a_forged_step_is_refused_with_the_key(tmp_path: Path) -> None:
    save(state(), tmp_path / "run", 5, key=KEY)
    forge(tmp_path / "run", 5, change_first_element)
    loaded = ckpt.load(tmp_path / "run", step=5, strict=True)
    assert loaded["weight"][0] == np.float32(1e30), "the forged step is inconsistent: digests alone find it"
    with pytest.raises(ckpt.SignatureError, match="changed after"):
        ckpt.load(tmp_path / "run", step=5, strict=True, key=KEY)
    with pytest.raises(ckpt.IntegrityError, match="step 5|steps/5"):
        ckpt.load(tmp_path / "run", key=KEY)


def test_an_older_signed_step_is_loaded_instead_of_a_forged_one(tmp_path: Path) -> None:
    for step in (4, 5):
        save({"weight": np.full(300_000, step, np.float32)}, tmp_path, step, key=KEY)
    forge(tmp_path, 5, change_first_element)
    with pytest.warns(UserWarning, match="older step 4"):
        loaded = ckpt.load(tmp_path, key=KEY)
    assert loaded["weight"][0] == 4


def test_a_step_without_its_signature_is_refused_with_the_key(tmp_path: Path) -> None:
    save(state(), tmp_path, 5, key=KEY)
    rewrite_commit(tmp_path, 5, signature=None)
    ckpt.load(tmp_path, step=5)
    with pytest.raises(ckpt.SignatureError, match="no signature"):
        ckpt.load(tmp_path, step=5, key=KEY)


def test_a_signature_of_another_step_is_refused(tmp_path: Path) -> None:
    for step in (4, 5):
        save({"weight": np.full(300_000, step, np.float32)}, tmp_path, step, key=KEY)
    commit_of_4 = json_records.decode_commit((tmp_path / "steps/4/commit.json").read_bytes(), "commit")
    (tmp_path / "steps/5/commit.json").write_bytes(json_records.encode_commit(dataclasses.replace(commit_of_4, step=5)))
    with pytest.raises(ckpt.SignatureError):
        ckpt.load(tmp_path, step=5, key=KEY)


def test_a_changed_byte_of_any_file_of_a_signed_step_is_found(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(state(), root, 5, key=KEY)
    good = snapshot(root)
    files = sorted(name for name in good if name.startswith("steps/"))
    assert {Path(name).suffix for name in files} == {".json", ".parquet", ".pack"}
    for name in files:
        for at in (0, len(good[name]) // 2):
            changed = bytearray(good[name])
            changed[at] ^= 1
            (root / name).write_bytes(changed)
            with pytest.raises(ckpt.IntegrityError):
                ckpt.load(root, step=5, key=KEY)
        (root / name).write_bytes(good[name])
    assert np.array_equal(ckpt.load(root, step=5, key=KEY)["weight"], state()["weight"])


def test_a_partial_read_is_checked_by_the_digest_of_the_whole_block(tmp_path: Path) -> None:
    """The checksums of cells are xxh3, for which collisions are easy to make: with blake3 they prove nothing."""
    save(state(), tmp_path, 5, digest="blake3")
    forge(tmp_path, 5, change_first_element, block_digests=False)
    with pytest.raises(ckpt.IntegrityError, match="digest"):
        ckpt.open(tmp_path)[5]["weight"][:8]
    with pytest.raises(ckpt.IntegrityError, match="digest"):
        ckpt.load(tmp_path, {"weight": np.zeros(300_000, np.float32)}, step=5)


def test_manifest_and_tree_of_a_step_with_blake3_have_blake3_digests(tmp_path: Path) -> None:
    commit = save(state(), tmp_path, 5, digest="blake3").commit
    for file in (*commit.manifests, *commit.trees):
        assert digest("blake3", (tmp_path / file.name).read_bytes()).hex() == file.digest


def test_a_signed_save_does_not_refer_to_forged_blocks(tmp_path: Path) -> None:
    """A forged step must not give its blocks to the next signed step, in the same process and in another one."""
    program = (
        "import sys, numpy, ckpt\n"
        "ckpt.save({'weight': numpy.arange(300_000, dtype=numpy.float32), 'step': int(sys.argv[2])}, sys.argv[1], "
        "int(sys.argv[2]), key=bytes(range(32)), codec='none')\n"
    )
    finish(python(program, tmp_path / "run", 5))
    forge(tmp_path / "run", 5, change_first_element)
    finish(python(program, tmp_path / "run", 6))
    assert np.array_equal(ckpt.load(tmp_path / "run", step=6, key=KEY)["weight"], state()["weight"])
    packs = {file.name for file in ckpt.open(tmp_path / "run", key=KEY).commit(6).packs}
    assert packs
    assert all(name.startswith("steps/6/") for name in packs)


def test_an_unsigned_step_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    save(state(), tmp_path, 5)
    before = snapshot(tmp_path / "steps")
    with pytest.raises(ckpt.SignatureError, match="without a key"):
        save(state(), tmp_path, 5, key=KEY)
    assert snapshot(tmp_path / "steps") == before
    save(state(), tmp_path, 5, key=KEY, overwrite=True)
    ckpt.load(tmp_path, step=5, key=KEY)


def test_keep_does_not_count_unsigned_steps_of_a_signed_run(tmp_path: Path) -> None:
    for step in (1, 2):
        save({"weight": np.full(300_000, step, np.float32)}, tmp_path, step)
    save({"weight": np.full(300_000, 3, np.float32)}, tmp_path, 3, key=KEY, keep=2)
    assert ckpt.open(tmp_path).steps() == [1, 2, 3]
    save({"weight": np.full(300_000, 4, np.float32)}, tmp_path, 4, key=KEY, keep=2)
    assert ckpt.open(tmp_path).steps() == [3, 4]


def test_a_key_file_with_an_older_key_reads_its_steps(tmp_path: Path) -> None:
    (tmp_path / "old.key").write_text(KEY.hex() + "\n")
    (tmp_path / "new.key").write_text(f"# the present key\n{OTHER_KEY.hex()}\n\n{KEY.hex()}\n")
    save(state(), tmp_path / "run", 5, key=tmp_path / "old.key")
    save(state(), tmp_path / "run", 6, key=tmp_path / "new.key")
    ckpt.load(tmp_path / "run", step=5, key=tmp_path / "new.key")
    with pytest.raises(ckpt.SignatureError, match="signed with key") as refused:
        ckpt.load(tmp_path / "run", step=6, key=tmp_path / "old.key")
    assert KEY.hex() not in str(refused.value)
    assert "steps/6" in str(refused.value)


def test_an_environment_variable_names_the_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    monkeypatch.setenv("CKPT_KEY_FILE", str(tmp_path / "key"))
    with ckpt.Checkpointer(tmp_path / "run", every=None, codec="none") as ck:
        ck.save(5, state())
    monkeypatch.delenv("CKPT_KEY_FILE")
    assert ckpt.open(tmp_path / "run").commit(5).signature is not None
    forge(tmp_path / "run", 5, change_first_element)
    monkeypatch.setenv("CKPT_KEY_FILE", str(tmp_path / "key"))
    with ckpt.Checkpointer(tmp_path / "run", every=None, codec="none") as ck, pytest.raises(ckpt.SignatureError):
        ck.restore(state())


def test_a_forged_record_does_not_abandon_signed_steps(tmp_path: Path) -> None:
    """The training line is a part of the signed data. A forged record can't make signed steps count as abandoned."""
    for begin, steps in ((None, range(4)), (1, range(2, 5))):
        with ckpt.Checkpointer(tmp_path, every=None, codec="none", key=KEY) as ck:
            if begin is not None:
                ck.restore({"weight": np.zeros(300_000, np.float32)}, step=begin)
            for step in steps:
                ck.save(step, {"weight": np.full(300_000, step, np.float32)}, blocking=True)
    assert ckpt.load(tmp_path, key=KEY, strict=True)["weight"][0] == 4
    line = ckpt.open(tmp_path, key=KEY).commit(4).line
    assert line > 0
    forged = tmp_path / "steps/3/commit.json"
    commit = json_records.decode_commit(forged.read_bytes(), "commit")
    left = ((0, -1), (line, -1))
    forged.write_bytes(json_records.encode_commit(dataclasses.replace(commit, line=line + 1, left=left, signature=None)))
    assert ckpt.open(tmp_path).order().abandoned >= {4}
    with ckpt.Checkpointer(tmp_path, every=None, codec="none", key=KEY, keep=1) as ck:
        assert ck.restore({"weight": np.zeros(300_000, np.float32)})[1] == 5
        ck.save(5, {"weight": np.full(300_000, 5, np.float32)}, blocking=True)
    assert ckpt.load(tmp_path, key=KEY, strict=True)["weight"][0] == 5


def test_a_signed_step_is_copied_between_tiers_and_checked(tmp_path: Path) -> None:
    near = ckpt.Tier(tmp_path / "near", every=1, keep=2)
    with ckpt.Checkpointer(tmp_path / "run", every=2, tiers=[near], key=KEY, codec="none") as ck:
        for step in range(4):
            ck.step(step, {"weight": np.full(300_000, step, np.float32)})
    assert ckpt.load(tmp_path / "run", key=KEY)["weight"][0] == 3
    shutil.rmtree(tmp_path / "run/steps")
    forge(tmp_path / "near", 3, change_first_element)
    with (
        pytest.warns(UserWarning, match="older step 2"),
        ckpt.Checkpointer(tmp_path / "run", every=None, tiers=[near], key=KEY, codec="none") as ck,
    ):
        loaded, start = ck.restore({"weight": np.zeros(300_000, np.float32)})
    assert (loaded["weight"][0], start) == (2, 3)


@pytest.mark.parametrize("codec", [{"id": "zlib", "level": 1}, None])
def test_a_copy_to_another_tier_is_checked_by_the_digest(tmp_path: Path, codec: dict[str, Any] | None) -> None:
    """A stored block whose xxh3 checksum matches but whose digest does not is not copied."""
    from ckpt.block_io.stored_block_check import is_good_block

    checkpoint = save(state(), tmp_path, 5, digest="blake3", codec=codec or "none")
    row = checkpoint.manifest().rows[0]
    stored = (tmp_path / (row.pack or "")).read_bytes()[row.position :][: row.stored]
    assert is_good_block("blake3", row, memoryview(stored))
    assert not is_good_block("blake3", row._replace(digest=bytes(32)), memoryview(stored))


def test_the_log_and_inspect_name_the_digest_and_the_signature_check(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    save(state(), tmp_path / "plain", 5)
    save(state(), tmp_path / "signed", 5, key=KEY)
    identity = ckpt.open(tmp_path / "signed").commit(5).signature
    assert identity is not None

    def inspect(*command: object) -> str:
        program = "from ckpt.tools.inspect import main; main()"
        return finish(python(program, *command))

    caplog.set_level("INFO", "ckpt")
    ckpt.load(tmp_path / "plain")
    assert "xxh3-128 digests, which detect accidental damage but no forgery; not signed" in caplog.text
    ckpt.load(tmp_path / "signed")
    assert f"blake3 digests; signed with key {identity.key}, signature not checked" in caplog.text
    ckpt.load(tmp_path / "signed", key=KEY)
    assert f"blake3 digests; signed with key {identity.key}, signature checked" in caplog.text
    assert "signature not checked" in inspect(tmp_path / "signed", "--verify")
    assert "signature checked" in inspect(tmp_path / "signed", "--verify", "--key-file", tmp_path / "key")
    facts = json.loads(inspect(tmp_path / "signed", "--json", "--key-file", tmp_path / "key"))
    assert facts["steps"][0]["signature"] == {"key": identity.key, "checked": True}


def test_ranks_with_different_keys_save_nothing(tmp_path: Path) -> None:
    """Rank parts in the store are signed, too: rank 0 signs nothing that another process could have put there."""

    def save_as_ranks(keys: list[bytes | None], step: int) -> list[BaseException | None]:
        errors: list[BaseException | None] = [None] * len(keys)

        def run(group: Any, rank: int) -> None:
            try:
                save(state(), tmp_path / "run", step, group=group, key=keys[rank])
            except BaseException as error:
                errors[rank] = error

        threads = [Thread(target=run, args=(group, rank)) for rank, group in enumerate(ThreadGroup.make(len(keys)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    assert save_as_ranks([KEY, KEY], 1) == [None, None]
    ckpt.load(tmp_path / "run", step=1, key=KEY)
    for step, keys in enumerate(([KEY, OTHER_KEY], [KEY, None], [None, KEY]), 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors = save_as_ranks([*keys], step)
        assert all(isinstance(error, ckpt.CkptError) and "key" in str(error) for error in errors), errors
        assert step not in ckpt.open(tmp_path / "run").steps()


@pytest.mark.parametrize(
    ("text", "match"),
    [("", "no key"), ("abcd", "at least 32 bytes"), ("not hexadecimal", "line 1"), (None, "can't be read")],
)
def test_an_unusable_key_file_is_refused(tmp_path: Path, text: str | None, match: str) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text)
    with pytest.raises(ckpt.InvalidArgument, match=match):
        save(state(), tmp_path / "run", 5, key=tmp_path / "key")
    assert not (tmp_path / "run").exists()


def test_a_key_and_forgeable_digests_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ckpt.InvalidArgument, match="blake3"):
        save(state(), tmp_path / "run", 5, key=KEY, digest="xxh3-128")
