"""Wrong arguments raise an error of one line with the reason and what to do next, and change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.forked_child import in_forked_child
from helpers.refusal import refused
from helpers.refusal import root as root
from helpers.repositories import snapshot
from helpers.states import assert_same, state_of

import ckpt
from ckpt.groups.threads import ThreadGroup
from ckpt.repository.repository import Repository
from ckpt.storage.local.directory import LocalStore
from ckpt.training import heartbeat_page


@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"codec": "zstd"}, ckpt.InvalidArgument, "numcodecs"),
        ({"codec": {"id": "nonsense"}}, ckpt.InvalidArgument, "nonsense"),
        ({"codec": {"id": "pickle"}}, ckpt.InvalidArgument, "pickle"),
        ({"codec": {"id": "quantize", "digits": 1, "dtype": "f4"}}, ckpt.InvalidArgument, "quantize"),  # loses digits
        ({"codec": {"id": "blosc", "cname": "nonsense"}}, ckpt.InvalidArgument, "can't encode"),
        ({"codec": {"id": "zstd", "level": print}}, ckpt.InvalidArgument, "not understood"),
        ({"codec": {"id": "zstd", "speed": 3}}, ckpt.InvalidArgument, "not understood"),
        ({"codec": {"embed": 7}}, ckpt.InvalidArgument, "7"),
        ({"codec": {}}, ckpt.InvalidArgument, "pattern"),
        ({"overwrite": "no"}, ckpt.InvalidArgument, "True or False"),
        ({"blocking": "no"}, ckpt.InvalidArgument, "True or False"),
        ({"verify_replicas": 1}, ckpt.InvalidArgument, "True or False"),
        ({"codec": {"id": "bz2", "level": 99}}, ckpt.InvalidArgument, "bz2"),
        ({"digest": "md5"}, ckpt.InvalidArgument, "blake3"),
        ({"keep": 0}, ValueError, "at least the last step"),
        ({"keep": -1}, ValueError, "at least the last step"),
        ({"keep": "3"}, ckpt.InvalidArgument, "ckpt.Keep"),
        ({"keep": 2.5}, ckpt.InvalidArgument, "ckpt.Keep"),
        ({"memory": "1G"}, ckpt.InvalidArgument, "memory='1G'"),
        ({"memory": 0}, ckpt.InvalidArgument, "positive number of bytes"),
        ({"memory": 1e9}, ckpt.InvalidArgument, "positive number of bytes"),
        ({"timeout": "x"}, ckpt.InvalidArgument, "timeout='x'"),
        ({"timeout": None}, ckpt.InvalidArgument, "number of seconds"),
        ({"timeout": float("nan")}, ckpt.InvalidArgument, "number of seconds"),
        ({"timeout": 0}, ckpt.InvalidArgument, "number of seconds"),
    ],
    ids=str,
)
def test_a_wrong_option_of_save_is_refused(root: Path, options: dict[str, Any], kind: type[BaseException], word: str) -> None:
    before = {n: d for n, d in snapshot(root).items() if not n.startswith("generations")}
    with refused(kind, word):
        ckpt.save(state_of(5), root, 5, **options)
    assert {n: d for n, d in snapshot(root).items() if not n.startswith("generations")} == before


@pytest.mark.parametrize("step", [-1, 1 << 62, 1.5, "7", None.__class__, np.array([1, 2])], ids=str)
def test_a_wrong_step_number_is_refused(root: Path, step: Any) -> None:
    with refused(ckpt.CkptError, "step", root=root):
        ckpt.save(state_of(5), root, step)
    with refused(ckpt.CkptError, "step", root=root):
        ckpt.load(root, step=step)


WRONG_STEPS = ["7", 100.5, None, np.float32(3), {"w": np.zeros(3)}, -1, 1 << 70]


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("every", [5, None, "auto"])
def test_a_wrong_step_number_of_a_loop_is_refused_at_every_step(
    root: Path, every: Any, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds whether or not a save is due, and under ckpt-run, where most steps only publish a heartbeat."""
    if watched:
        monkeypatch.setattr(heartbeat_page, "_own_page", heartbeat_page.HeartbeatPage(root.parent / "page", new=True))
        monkeypatch.setattr(heartbeat_page, "_is_looked_up", True)
    with ckpt.Checkpointer(root, every=every) as saver:
        for step in (10, 11, np.int64(12)):
            saver.step(step, state_of(0), loss=1.0)
            for wrong in WRONG_STEPS:
                with refused(ckpt.InvalidArgument, "step"):
                    saver.step(wrong, state_of(0), loss=1.0)
                saver.step(step, state_of(0), loss=1.0)  # the loop continues
                assert (saver._idle_window is not None) == watched


@pytest.mark.parametrize("url", ["", 3, b"here", "a\0b", {}], ids=repr)
def test_a_url_that_names_no_repository_is_refused(root: Path, url: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty URL, for example from an unset variable, does not mean the current folder."""
    monkeypatch.chdir(root.parent)
    for call in (
        lambda: ckpt.load(url), lambda: ckpt.save(state_of(5), url, 5), lambda: ckpt.open(url), lambda: ckpt.Checkpointer(url),
    ):  # fmt: skip
        with refused(ckpt.InvalidArgument, "names no repository", root=root.parent):
            call()


def test_a_state_given_as_a_url_is_not_printed(root: Path) -> None:
    state = state_of(5)
    with pytest.raises(ckpt.InvalidArgument, match="an object of type dict names no repository") as caught:
        ckpt.save(str(root), state, 5)
    assert len(str(caught.value)) < 200


def test_a_wrong_option_of_a_checkpointer_is_refused(root: Path) -> None:
    for options in (
        {"every": 0}, {"every": -5}, {"every": "10m"}, {"every": 2.5}, {"every": True}, {"every": -timedelta(1)},
        {"in_flight": 0}, {"in_flight": "2"}, {"keep": "3"}, {"memory": "1G"}, {"timeout": "x"}, {"timeout": None},
        {"tiers": ["memory"]}, {"tiers": "memory"}, {"tiers": ckpt.Tier("memory")}, {"tiers": 3},
        {"scrub": -1}, {"scrub": "fast"}, {"nan": "no"}, {"full_every": 0}, {"verify_replicas": 1},
    ):  # fmt: skip
        with refused(ckpt.InvalidArgument, next(iter(options)), root=root):
            ckpt.Checkpointer(root, **options)
    with refused(ckpt.InvalidArgument, "codec", "pattern", root=root):
        ckpt.Checkpointer(root, codec={1: "none"})
    for options in ({"codec": "zstd"}, {"digest": "md5"}, {"scrub": -1, "tiers": [ckpt.Tier(root.parent / "near")]}):
        with refused(ckpt.InvalidArgument, root=root):
            ckpt.Checkpointer(root, **options)
    saved = in_forked_child(lambda: ckpt.save(state_of(5), root, 5).step)  # no refused Checkpointer keeps the writer lease
    assert saved == 5


def test_numpy_numbers_are_accepted_as_options(root: Path) -> None:
    """A configuration may contain them; a number that is not recognised would mean "auto"."""
    two = np.int64(2)
    tiers = [ckpt.Tier(root.parent / "near", every=two, limit=np.int64(1 << 30))]
    assert tiers[0].counts(1)
    assert not tiers[0].counts(2)
    with ckpt.Checkpointer(root, every=two, keep=two, memory=np.int64(1 << 20), in_flight=two, timeout=np.float32(5)) as saver:
        for step in range(10, 14):
            saver.step(step, state_of(step))
    assert ckpt.open(root).steps() == [11, 13]


@pytest.mark.parametrize("options", [{"limit": "1G"}, {"limit": 0}, {"every": "10m"}, {"every": 0}, {"keep": "3"}], ids=str)
def test_a_wrong_option_of_a_tier_is_refused(options: dict[str, Any]) -> None:
    with refused(ckpt.InvalidArgument, next(iter(options))):
        ckpt.Tier("memory", **options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"only": 3}, "model.*"), ({"only": b"embed"}, "model.*"), ({"only": ["embed", 3]}, "model.*"),
        ({"rename": "x"}, "regular expression"), ({"rename": {"(": "x"}}, "unterminated"), ({"rename": {3: "x"}}, "regular"),
        ({"rename": {"x": r"\2"}}, "group reference"), ({"rename": {"x": None}}, "regular"),
        ({"only": []}, "model.*"), ({"strict": "no"}, "True or False"), ({"strict": None}, "True or False"),
        ({"progress": 3}, "function"), ({"share_reads": "never"}, "'auto', True or False"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_option_of_load_is_refused(root: Path, options: dict[str, Any], word: str) -> None:
    with refused(ckpt.InvalidArgument, next(iter(options)), word, root=root):
        ckpt.load(root, state_of(0), **options)
    if "only" not in options and "progress" not in options:
        with ckpt.Checkpointer(root, every=None) as saver, refused(ckpt.InvalidArgument, next(iter(options)), word):
            saver.restore(state_of(0), **options)


def test_patterns_may_come_from_an_iterator(root: Path) -> None:
    assert list(ckpt.load(root, only=iter(["embed", "step"]))) == list(ckpt.load(root, only=["embed", "step"]))


def test_a_closed_checkpointer_refuses_calls(root: Path) -> None:
    saver = ckpt.Checkpointer(root)
    saver.close()
    saver.close()
    for call in (lambda: saver.save(1, {}), lambda: saver.step(1, {}), lambda: saver.restore({}), saver.wait):
        with refused(ckpt.CkptError, "closed"):
            call()


def test_an_existing_step_is_replaced_only_with_overwrite(root: Path) -> None:
    with refused(ckpt.AlreadyExists, "step 4", "overwrite=True"):
        ckpt.save(state_of(5), root, 4)
    assert_same(ckpt.load(root, step=4), state_of(4))
    ckpt.save(state_of(5), root, 4, overwrite=True)
    assert_same(ckpt.load(root, step=4), state_of(5))


def test_a_missing_step_is_named_with_the_existing_ones(root: Path, tmp_path: Path) -> None:
    for call in (lambda: ckpt.load(root, step=7), lambda: ckpt.open(root)[7]):
        with refused(ckpt.StepNotFound, "no committed step 7", "3, 4", root=root):
            call()
    with ckpt.Checkpointer(tmp_path / "empty"):
        pass
    with refused(ckpt.StepNotFound, "no committed step"):
        ckpt.load(tmp_path / "empty")
    (root / "steps/9/pack").mkdir(parents=True)  # begun but not committed
    with refused(ckpt.StepNotFound, "no committed step 9"):
        ckpt.load(root, step=9)
    assert ckpt.open(root).steps() == [3, 4]


def test_an_unknown_leaf_is_named_with_similar_ones(root: Path) -> None:
    for only in ("embedd", "model.7", ["embed", "nothing.*"], "x*"):
        with refused(ckpt.LeafNotFound, only if isinstance(only, str) else "nothing.*", "step 4", root=root):
            ckpt.load(root, only=only)
    with refused(ckpt.LeafNotFound, "nothing like it", "there are ", root=root):
        ckpt.load(root, only="nothing like it")
    with refused(ckpt.LeafNotFound, "embedd", "embed", root=root):
        ckpt.open(root)[4]["embedd"]


@pytest.mark.parametrize("url", ["nonsense://host/run", "sqlite://x", "file://elsewhere/run", "://", "a b://c"])
def test_an_unknown_scheme_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: ckpt.load(url), lambda: ckpt.open(url), lambda: ckpt.save({"a": 1}, url)):
        with refused(ckpt.UnknownScheme, url, root=tmp_path):
            call()


def test_a_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for call in (lambda: ckpt.load(tmp_path), lambda: ckpt.open(tmp_path), lambda: ckpt.load(tmp_path, step=1)):
        with refused(ckpt.FormatError, "not a checkpoint repository", "check the path", root=tmp_path):
            call()
    for call in (lambda: ckpt.save({"a": 1}, tmp_path), lambda: ckpt.Checkpointer(tmp_path)):
        with refused(ckpt.FormatError, "notes.txt", "new folder", root=tmp_path):
            call()


def test_a_missing_path_or_a_file_is_refused(tmp_path: Path) -> None:
    nowhere, groups = tmp_path / "nowhere", ThreadGroup.make(2)
    for call in (
        lambda: ckpt.load(nowhere), lambda: ckpt.load(nowhere, step=3), lambda: ckpt.open(nowhere),
        lambda: ckpt.load(nowhere, {}, only="a"), lambda: Repository(LocalStore(nowhere)).steps(),
    ):  # fmt: skip
        with refused(ckpt.StepNotFound, "nothing has been saved", str(nowhere), "check the path", root=tmp_path):
            call()
    with ThreadPoolExecutor(2) as pool:
        for failed in [pool.submit(ckpt.load, nowhere, group=group) for group in groups]:
            assert isinstance(failed.exception(), ckpt.StepNotFound)
    assert not list(nowhere.glob("[!m]*"))
    (tmp_path / "file").write_text("mine")
    for call in (lambda: ckpt.load(tmp_path / "file"), lambda: ckpt.save({"a": 1}, tmp_path / "file")):
        with refused(ckpt.CkptError, str(tmp_path / "file"), root=tmp_path):
            call()


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return a state after this change."""
    like = state_of(0)
    change(like)
    return like


@dataclasses.dataclass
class Other:
    a: int = 1


LIKES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[ckpt.CkptError], tuple[str, ...]]] = {
    "shape": (lambda s: s.update(embed=np.zeros(7, np.uint8)), ckpt.LeafMismatch, ("embed", "shape [10000]", "[7]")),
    "axes": (lambda s: s["model"].__setitem__(0, np.zeros((5000, 1), "f4")), ckpt.LeafMismatch, ("model.0", "shape")),
    "dtype": (lambda s: s["model"].__setitem__(0, np.zeros(5000)), ckpt.LeafMismatch, ("model.0", "float32", "float64")),
    "kind": (lambda s: s.update(embed={"a": 1}), ckpt.LeafMismatch, ("embed", "array", "dict")),
    "number": (lambda s: s.update(embed=3), ckpt.LeafMismatch, ("embed", "array", "int")),
    "array": (lambda s: s.update(step=np.zeros(3)), ckpt.LeafMismatch, ("step", "int", "ndarray")),
    "missing": (lambda s: s["slow"].update(c=np.zeros(3)), ckpt.LeafNotFound, ("slow.c", "not in")),
    "missing number": (lambda s: s.update(extra=3), ckpt.LeafNotFound, ("extra", "not in")),
    "longer": (lambda s: s["model"].append(1), ckpt.LeafMismatch, ("model", "2 entries", "3")),
    "list": (lambda s: s.update(moments=list(s["moments"])), ckpt.LeafMismatch, ("moments", "tuple", "list")),
    "dataclass": (lambda s: s.update(slow=Other()), ckpt.LeafMismatch, ("slow", "dict", "Other")),
    "masked": (lambda s: s["slow"].update(b=np.ma.zeros((3, 5), "i2")), ckpt.LeafMismatch, ("slow.b", "masked")),
}


@pytest.mark.parametrize("case", LIKES)
def test_a_like_that_differs_is_refused_before_anything_is_written(root: Path, case: str) -> None:
    """The difference may be anywhere in `like`."""
    change, kind, words = LIKES[case]
    for like in (changed(change), {k: changed(change)[k] for k in reversed(changed(change))}):
        before = [(k, np.copy(v) if isinstance(v, np.ndarray) else v) for k, v in flat(like)]
        with refused(kind, *words, root=root):
            ckpt.load(root, like)
        after = flat(like)
        assert [k for k, _ in after] == [k for k, _ in before]
        for (key, now), (_, then) in zip(after, before, strict=True):
            assert np.array_equal(now, then) if isinstance(now, np.ndarray) else now == then, key
        with ckpt.Checkpointer(root) as saver, pytest.raises(kind):
            saver.restore(like)


def flat(state: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a state, each with its path."""
    if isinstance(state, dict):
        return [p for k, v in state.items() for p in flat(v, f"{path}.{k}")]
    if isinstance(state, (list, tuple)):
        return [p for i, v in enumerate(state) for p in flat(v, f"{path}.{i}")]
    return [(path, state)]


def test_a_module_of_another_shape_is_refused_and_unchanged(root: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ckpt.save({"model": torch.nn.Linear(3, 4)}, tmp_path / "m", 0)
    model = torch.nn.Linear(3, 5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with refused(ckpt.LeafMismatch, "model.weight", "[4, 3]", "[5, 3]"):
        ckpt.load(tmp_path / "m", {"model": model})
    with refused(ckpt.CkptError, "model"):
        ckpt.load(tmp_path / "m", {"model": torch.nn.BatchNorm1d(3)})
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_module_of_other_entries_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def like(bias: bool, norm: bool = False) -> dict[str, Any]:
        layers = [torch.nn.Linear(2, 2, bias=bias), *([torch.nn.BatchNorm1d(2)] * norm)]
        return {"a": np.zeros(3), "model": torch.nn.Sequential(*layers), "z": np.zeros(3)}

    saved = {"a": np.ones(3), "model": torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)), "z": np.ones(3)}
    ckpt.save(saved, tmp_path, 0)
    ckpt.save(saved | {"model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))}, tmp_path, 1)
    for step, target, words in (
        (0, like(bias=True), ["lacks 0.bias"]),
        (1, like(bias=False), ["`like` lacks 0.bias, 1.bias, 1.weight of step 1"]),
        (
            0,
            like(bias=True, norm=True),
            ["lacks 0.bias"],
        ),  # a norm has a load function of its own, the layer before it has none
    ):
        before = target["model"][0].weight.detach().clone()
        with refused(ckpt.LeafMismatch, "leaf model", "Sequential", "only=", *words):
            ckpt.load(tmp_path, target, step=step)
        assert torch.equal(target["model"][0].weight, before)
        assert not any(target[key].any() for key in "az")
    target = like(bias=True)
    ckpt.load(tmp_path, target, step=0, only=["model.0.weight", "z"])
    assert torch.equal(target["model"][0].weight, saved["model"][0].weight)
    assert (target["a"].any(), target["z"].all()) == (False, True)


def test_a_module_with_a_load_hook_may_accept_other_entries(tmp_path: Path) -> None:
    """With hooks or a load function of its own, a module may accept entries of other names."""
    torch = pytest.importorskip("torch")
    old = torch.nn.Linear(2, 2)
    ckpt.save({"model": {"w": old.weight.detach(), "bias": old.bias.detach()}}, tmp_path)

    def rename(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "w")

    class Own(torch.nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            rename(self, state, prefix)
            super()._load_from_state_dict(state, prefix, *rest)

    hooked = torch.nn.Linear(2, 2)
    hooked.register_load_state_dict_pre_hook(rename)
    for model in (hooked, Own(2, 2)):
        ckpt.load(tmp_path, {"model": model})
        assert torch.equal(model.weight, old.weight)
        assert torch.equal(model.bias, old.bias)


def test_names_that_leave_the_root_are_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    for name in ("../x", "/etc/passwd", "a/../../x", "a//b", ".hidden", "a/.tmp", "", "a\0b", "x" * 2000):
        for call in (store.get, store.open, store.create, lambda n: store.put(n, b""), lambda n: store.delete([n])):
            with refused(ckpt.InvalidName, "not a valid object name"):
                call(name)
    assert not (tmp_path / "run").exists()
