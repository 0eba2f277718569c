"""A byte flipped, missing or cut anywhere in a repository is found, reported, and never taken for data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
from helpers.campaigns import CountCases
from helpers.processes import SOAK
from helpers.repositories import assert_clean, snapshot
from helpers.states import assert_same, state_of, write_into
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.repository import damage_registry

STEPS = (3, 4, 5)
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"codec": "none"},
    "blosc": {"codec": numcodecs.Blosc("zstd", 1, numcodecs.Blosc.SHUFFLE), "digest": "blake3"},
    "lz4": {"codec": numcodecs.LZ4()},
    "zlib": {"codec": {"slow.*": {"id": "zlib", "level": 1}, "embed": numcodecs.Zstd(1), "*": None}},
}
EXAMPLES = settings(
    max_examples=1500 if SOAK else 70,
    deadline=None,
    print_blob=True,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrunk bytes of files explain nothing
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def saved(step: int) -> dict[str, Any]:
    """Return the saved state: 300 KB in one block, so that uncompressed blocks have two cells; it is compressible."""
    state = state_of(step, size=2000)
    state["wide"] = np.repeat(np.arange(step, step + 20_000, dtype=np.int64), 2).reshape(100, 400)
    return state


@dataclass(frozen=True, repr=False)
class Sample:
    """A repository, its bytes, and the byte ranges of its packs that each step needs."""

    root: Path
    data: dict[str, bytes]
    extents: dict[int, list[tuple[str, int, int, str]]]
    """By step: pack, first byte, end, leaf."""

    def needs(self, step: int, name: str) -> bool:
        """Return whether a step refers to a file."""
        commit = ckpt.open(self.root).commit(step)
        return name in {f.name for f in (*commit.manifests, *commit.trees, *commit.packs)}


@pytest.fixture(scope="module", params=list(CONFIGS))
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    config = CONFIGS[request.param]
    if config.get("digest") == "blake3":
        pytest.importorskip("blake3")
    root = tmp_path_factory.mktemp(request.param) / "run"
    extents = {}
    for step in STEPS:
        ckpt.save(saved(step), root, step, **config)
        rows = ckpt.open(root)[step].manifest().rows
        extents[step] = [(r.pack, r.position, r.position + r.stored, r.leaf) for r in rows if r.pack is not None]
    assert any(name.startswith("steps/3/") for name, *_ in extents[5]), "step 5 refers to no earlier block"
    sample = Sample(root, snapshot(root), extents)
    yield sample
    assert snapshot(root) == sample.data  # each test has repaired what it damaged


@dataclass(frozen=True)
class Damage:
    """What was done to which file: the bytes of [at, end) are changed."""

    name: str
    kind: str
    at: int
    end: int

    def touches(self, begin: int, end: int) -> bool:
        """Return whether any byte of [begin, end) is changed."""
        return self.at < end and begin < self.end


def damage_one_file(data: st.DataObject, sample: Sample, names: list[str]) -> Damage:
    """Let hypothesis damage one file, and return the damage."""
    name = data.draw(st.sampled_from(names), "file")
    whole = sample.data[name]
    path = sample.root / name
    kind = data.draw(st.sampled_from(["flip", "flip", "zero", "drop", "cut", "missing", "insert"]), "kind")
    at = data.draw(st.integers(0, len(whole) - 1), "at")
    if kind == "flip":
        bit = 1 << data.draw(st.integers(0, 7), "bit")
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        return Damage(name, kind, at, at + 1)
    if kind == "zero":  # a page that never reached the disk
        begin = at // 512 * 512
        changed = [i for i in range(begin, min(begin + 512, len(whole))) if whole[i]]
        path.write_bytes(whole[:begin] + bytes(len(whole[begin : begin + 512])) + whole[begin + 512 :])
        return Damage(name, kind, changed[0], changed[-1] + 1) if changed else Damage(name, kind, 0, 0)
    if kind == "drop":
        path.write_bytes(whole[:at] + whole[at + 1 :])
        rest = next((i for i in range(at, len(whole) - 1) if whole[i] != whole[i + 1]), len(whole) - 1)
        return Damage(name, kind, rest, len(whole))
    if kind == "insert":
        extra = data.draw(st.binary(min_size=1, max_size=9), "extra")
        new = whole[:at] + extra + whole[at:]
        path.write_bytes(new)
        first = next((i for i in range(len(whole)) if whole[i] != new[i]), len(whole))
        return Damage(name, kind, first, len(whole) + 9)
    if kind == "cut":
        path.write_bytes(whole[:at])
        return Damage(name, kind, at, len(whole))
    path.unlink()
    return Damage(name, kind, 0, len(whole))


@pytest.fixture
def repaired(sample: Sample) -> Iterator[Callable[[], None]]:
    """Yield a function that makes the sample whole again; it is also called at the end."""

    def repair() -> None:
        for name in snapshot(sample.root).keys() - sample.data.keys():
            (sample.root / name).unlink()
        for name, whole in sample.data.items():
            path = sample.root / name
            if not path.exists() or path.read_bytes() != whole:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(whole)
        damage_registry.clear_damaged(ckpt.repository.repository.open_repository(sample.root))

    yield repair
    repair()


def try_load(*args: Any, **options: Any) -> tuple[Any, ckpt.CkptError | None]:
    """Return what a load returns, or its CkptError. Any other exception fails the test."""
    try:
        return ckpt.load(*args, **options), None
    except ckpt.CkptError as error:
        text = str(error)
        assert "\n" not in text, text
        return None, error


def is_hit(sample: Sample, damage: Damage, step: int) -> bool:
    """Return whether a load of all of `step` must fail."""
    if damage.name.endswith(".pack"):
        return any(p == damage.name and damage.touches(b, e) for p, b, e, _ in sample.extents[step])
    if damage.name == "ckpt.json":
        return True
    if damage.name.endswith("commit.json"):
        return damage.name == f"steps/{step}/commit.json"
    manifests = [n for n in sample.data if n.startswith(f"steps/{step}/manifest/")]
    return damage.name in manifests


@pytest.mark.soak
@EXAMPLES
@given(data=st.data())
def test_a_load_finds_any_damage_of_the_bytes_it_reads(
    sample: Sample, repaired: Callable[[], None], data: st.DataObject, count_cases: CountCases
) -> None:
    repaired()
    count_cases(1)
    damage = damage_one_file(data, sample, sorted(sample.data))
    changed = (sample.root / damage.name).exists() and (sample.root / damage.name).read_bytes() == sample.data[damage.name]
    if changed:  # the file is unchanged: one of two equal bytes was dropped
        return
    hit = {}
    for step in STEPS:
        hit[step] = is_hit(sample, damage, step)
        got, error = try_load(sample.root, step=step)
        like = write_into(saved(0), saved(0))
        _, error_like = try_load(sample.root, like, step=step)
        if hit[step]:
            assert error is not None, f"{damage} was not found by step {step}"
            assert error_like is not None
            deleted = damage.name.endswith("commit.json") and damage.kind == "missing"
            assert deleted or damage.name in str(error), error
            if deleted:
                assert isinstance(error, ckpt.StepNotFound)
            if damage.name.endswith(".pack"):
                leaves = {leaf for p, b, e, leaf in sample.extents[step] if p == damage.name and damage.touches(b, e)}
                assert any(f"leaf {leaf} " in str(error) for leaf in leaves), (error, leaves)
        else:
            assert error is None, (damage, error)
            assert_same(got, saved(step))
            assert_same(like, saved(step))
    check_listing(sample, damage, hit)
    check_newest(sample, damage, hit)


def check_listing(sample: Sample, damage: Damage, hit: dict[int, bool]) -> None:
    """Check repo.steps() and verify()."""
    if damage.name == "ckpt.json":
        with pytest.raises(ckpt.CkptError):
            ckpt.open(sample.root)
        return
    repo = ckpt.open(sample.root)
    assert repo.steps() == [s for s in STEPS if damage.name != f"steps/{s}/commit.json"]
    for step in repo.steps():
        if hit[step]:
            with pytest.raises(ckpt.CkptError):
                repo[step].verify()
        else:
            assert repo[step].verify() > 0


def check_newest(sample: Sample, damage: Damage, hit: dict[int, bool]) -> None:
    """Check that load() without a step takes the newest whole one, with a warning where it skips one."""
    whole = [s for s in STEPS if not hit[s]]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got, error = try_load(sample.root)
    if not whole:
        assert error is not None
        return
    assert error is None, error
    assert_same(got, saved(whole[-1]))
    deleted = damage.kind == "missing" and damage.name.endswith("commit.json")  # indistinguishable from a deleted step
    skipped = hit[STEPS[-1]] and not deleted
    assert bool(warned) == skipped, [str(w.message) for w in warned]
    got, error = try_load(sample.root, strict=True)
    assert (error is not None) == skipped
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ckpt.Checkpointer(sample.root) as saver:
            state, start = saver.restore(saved(0))
    assert start == whole[-1] + 1
    assert_same(state, saved(whole[-1]))


@pytest.mark.soak
@EXAMPLES
@given(data=st.data())
def test_a_lazy_read_is_correct_or_refused(
    sample: Sample, repaired: Callable[[], None], data: st.DataObject, count_cases: CountCases
) -> None:
    """A part of a leaf is read alone."""
    repaired()
    count_cases(1)
    damage = damage_one_file(data, sample, sorted(n for n in sample.data if n.startswith("steps/")))
    step = data.draw(st.sampled_from(STEPS), "step")
    first = data.draw(st.integers(0, 99), "first")
    count = data.draw(st.integers(1, 100), "count")
    try:
        got = ckpt.open(sample.root)[step]["wide"][first : first + count, 3:5]
    except ckpt.CkptError as error:
        assert is_hit(sample, damage, step), error
        assert "\n" not in str(error)
        return
    assert_same(got, saved(step)["wide"][first : first + count, 3:5])


@pytest.mark.soak
@settings(EXAMPLES, max_examples=300 if SOAK else 25)
@given(data=st.data())
def test_a_run_continues_after_damage_and_saves_complete_steps(
    sample: Sample, repaired: Callable[[], None], data: st.DataObject, count_cases: CountCases
) -> None:
    """The run falls back, reaches the damaged step again with the same state, and saves it whole.

    The blocks of the damaged step equal those of the new save: none of them may be deduplicated.
    """
    repaired()
    count_cases(1)
    damage = damage_one_file(data, sample, sorted(n for n in sample.data if n.startswith("steps/")))
    keep = data.draw(st.sampled_from([None, 1, 2]), "keep")
    hit = {step: is_hit(sample, damage, step) for step in STEPS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with ckpt.Checkpointer(sample.root, keep=keep, **CONFIGS.get("plain", {})) as saver:
                state, start = saver.restore(saved(0))
                for step in range(start, 7):
                    state = write_into(state, saved(step))
                    saver.save(step, state, blocking=True)
                    assert_same(ckpt.load(sample.root, step=step), saved(step))
        except ckpt.IntegrityError:
            assert all(hit.values())
            return
    assert_same(ckpt.load(sample.root, strict=True), saved(6))
    if keep:
        assert ckpt.open(sample.root).steps()[-keep:] == list(range(7 - keep, 7))
        assert_clean(sample.root)


def test_a_save_does_not_refer_to_a_truncated_pack(tmp_path: Path) -> None:
    """The process that saves has never loaded the pack."""
    ckpt.save(state_of(1), tmp_path, 1)
    (pack,) = tmp_path.glob("steps/1/pack/*.pack")
    pack.write_bytes(pack.read_bytes()[:1])
    ckpt.save(state_of(2), tmp_path, 2)
    assert_same(ckpt.load(tmp_path, step=2), state_of(2))


def test_keep_deletes_a_damaged_newer_step_and_not_the_good_one(tmp_path: Path) -> None:
    """With keep=1 after a fall-back, the new step must not be deleted in favour of the damaged one with a higher number."""
    for step in (1, 5):
        ckpt.save(state_of(step), tmp_path, step)
    (pack,) = tmp_path.glob("steps/5/pack/*.pack")
    pack.write_bytes(bytes(pack.stat().st_size))
    with pytest.warns(UserWarning, match="step 5 is damaged, so the older step 1 was loaded"):
        assert_same(ckpt.load(tmp_path), state_of(1))
    ckpt.save(state_of(2), tmp_path, 2, keep=1)
    assert ckpt.open(tmp_path).steps() == [2], "the damaged step was skipped, so it is abandoned"
    assert_same(ckpt.load(tmp_path, step=2), state_of(2))
    ckpt.save(state_of(6), tmp_path, 6, keep=1)
    assert ckpt.open(tmp_path).steps() == [6]
    assert_clean(tmp_path)


def test_a_damaged_commit_record_does_not_fill_the_disk(tmp_path: Path) -> None:
    """It blocks deletion of the files that it may refer to, until `keep` no longer includes its step."""
    for step in range(3):
        ckpt.save(state_of(step), tmp_path, step)
    record = tmp_path / "steps/1/commit.json"
    record.write_bytes(record.read_bytes().replace(b"1", b"2", 1))
    ckpt.save(state_of(3), tmp_path, 3, keep=3)
    assert (tmp_path / "steps/0/commit.json").exists()  # 0, 2 and 3 are the complete steps
    ckpt.save(state_of(4), tmp_path, 4, keep=2)
    assert ckpt.open(tmp_path).steps() == [3, 4]
    assert_clean(tmp_path)


def test_a_damaged_lease_record_does_not_stop_the_next_writer(tmp_path: Path) -> None:
    ckpt.save(state_of(1), tmp_path, 1)
    for record in tmp_path.glob("generations/*.json"):
        record.write_bytes(b"rot")
    ckpt.save(state_of(2), tmp_path, 2)
    assert ckpt.open(tmp_path).steps() == [1, 2]
