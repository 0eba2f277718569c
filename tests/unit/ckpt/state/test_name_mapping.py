"""Loads that rename leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.messages import one_line

import ckpt
from ckpt.adapters.torch import ModelState

torch = pytest.importorskip("torch")


def made(*names: str, trained: bool = False, lr: float = 9.0) -> tuple[Any, Any]:
    """Return a model of layers with these names, and an optimizer with a group for each layer."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})
    optimizer = torch.optim.AdamW([{"params": layer.parameters(), "lr": lr + i} for i, layer in enumerate(model.values())])
    if trained:
        for i, layer in enumerate(model.values()):
            (layer(torch.full((1, 2), i + 1.0)) ** 2).sum().backward()
        optimizer.step()
    return model, optimizer


def assert_same_layer(loaded: tuple[Any, Any], name: str, saved: tuple[Any, Any], old: str) -> None:
    """Check that weights, moments and options of a layer equal those of a saved layer of another name."""
    for parameter, other in zip(loaded[0][name].parameters(), saved[0][old].parameters(), strict=True):
        assert torch.equal(parameter, other)
        moments, saved_moments = loaded[1].state[parameter], saved[1].state[other]
        assert moments.keys() == saved_moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(moments[key], saved_moments[key]) for key in saved_moments)
    mine_group, group = (
        next(g for g in o.param_groups if any(p is m[n].weight for p in g["params"]))
        for (m, o), n in ((loaded, name), (saved, old))
    )
    assert mine_group["lr"] == group["lr"]


RENAMES: dict[str, Any] = {
    "anywhere": {"layer8": "layer0", "layer9": "layer1"},
    "of the model only": {r"^train\.model\.layer8": "train.model.layer0", r"^train\.model\.layer9": "train.model.layer1"},
    "a table of weights": lambda name: {
        f"train.model.layer{a}.{part}": f"train.model.layer{b}.{part}"
        for a, b in ((8, 0), (9, 1)) for part in ("weight", "bias")
    }[name] if name.startswith("train.model.") else name,
}  # fmt: skip


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
@pytest.mark.parametrize("trained", [False, True])
def test_moments_and_options_follow_renamed_parameters(tmp_path: Path, rename: Any, trained: bool) -> None:
    saved = made("layer0", "layer1", "layer2", trained=True, lr=1.0)
    ckpt.save({"train": ModelState(*saved)}, tmp_path)
    loaded = made("layer9", "layer8", trained=trained)  # the order of the groups does not matter
    ckpt.load(tmp_path, {"train": ModelState(*loaded)}, rename=rename)
    assert_same_layer(loaded, "layer8", saved, "layer0")
    assert_same_layer(loaded, "layer9", saved, "layer1")


def test_a_layer_that_was_not_first_in_its_group_is_loaded(tmp_path: Path) -> None:
    """The name of a group is that of its first parameter, which another stage may have."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("layer0", "layer1")})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    sum((layer(torch.ones(1, 2)) ** 2).sum() for layer in model.values()).backward()
    optimizer.step()
    ckpt.save({"train": ModelState(model, optimizer)}, tmp_path)
    loaded = made("only")
    ckpt.load(tmp_path, {"train": ModelState(*loaded)}, rename={"only": "layer1"})
    assert_same_layer(loaded, "only", (model, optimizer), "layer1")


def test_a_renamed_subtree_loads_with_its_optimizers(tmp_path: Path) -> None:
    """A fresh optimizer has no names for its moments; they are loaded all the same, also into a plain optimizer."""
    saved = made("a", trained=True, lr=1.0)
    ckpt.save({"old": {"train": ModelState(*saved), "optimizer": saved[1]}, "model": saved[0]}, tmp_path)
    loaded, plain = made("a"), made("a")
    like = {"new": {"train": ModelState(*loaded), "optimizer": plain[1]}, "net": plain[0]}
    ckpt.load(tmp_path, like, rename={"^new": "old", "^net": "model"})
    assert_same_layer(loaded, "a", saved, "a")
    assert_same_layer(plain, "a", saved, "a")


def test_missing_moments_are_an_error(tmp_path: Path) -> None:
    saved, loaded = made("a", trained=True), made("b")
    before = loaded[0]["b"].weight.detach().clone()
    ckpt.save({"model": saved[0]}, tmp_path)
    with pytest.raises(ckpt.LeafNotFound) as raised:
        ckpt.load(tmp_path, {"train": ModelState(*loaded)}, rename={r"^train\.model\.b": "model.a"})
    one_line(raised, "train.optimizer", "not in step 0")
    assert torch.equal(loaded[0]["b"].weight, before)
    ckpt.load(tmp_path, {"train": ModelState(*loaded)}, rename={r"^train\.model\.b": "model.a"}, only="train.model.*")
    assert torch.equal(loaded[0]["b"].weight, saved[0]["a"].weight)


def test_the_error_for_an_unknown_name_lists_saved_entries_alone(tmp_path: Path) -> None:
    ckpt.save({"w": np.ones(3), "n": 3}, tmp_path / "a", 1)
    with pytest.raises(ckpt.LeafNotFound) as raised:
        ckpt.load(tmp_path / "a", {"x": np.zeros(3)}, rename=lambda name: "zzzzzz")
    one_line(raised, "leaf x of `like`, renamed to zzzzzz, is not in", "; there are w, n; change rename")
    ckpt.save(np.ones(3), tmp_path / "b", 1)  # a single array has no other name
    with pytest.raises(ckpt.LeafNotFound) as raised:
        ckpt.load(tmp_path / "b", {"x": np.zeros(3)}, rename=lambda name: "zzzzzz")
    one_line(raised, "; there are (root); change rename")


def state(value: int) -> dict[str, Any]:
    """Return a state of many kinds of leaves and keys with this value."""
    return {
        "stage1": {"w": np.full(3, value)},
        "reader": ckpt.PerRank({"buffer": np.full(2, value), "seed": value}),
        "random": ckpt.RandomState(),
        "keys": {(1, 2): value, 0: np.full(1, value), None: value},
        "pair": (value, np.full(2, value)),
    }


def test_values_of_one_rank_and_keys_of_any_kind_survive_a_rename(tmp_path: Path) -> None:
    np.random.seed(3)
    ckpt.save(state(7), tmp_path)
    drawn = np.random.random()
    like = state(0)
    like["layers"] = like.pop("stage1")
    loaded = ckpt.load(tmp_path, like, rename={r"^layers\.": "stage1."})
    assert np.random.random() == drawn
    assert loaded["layers"]["w"].tolist() == [7, 7, 7]
    assert (loaded["reader"].value["buffer"].tolist(), loaded["reader"].value["seed"]) == ([7, 7], 7)
    assert loaded["keys"] == {(1, 2): 7, 0: np.full(1, 7), None: 7}
    assert (loaded["pair"][0], loaded["pair"][1].tolist()) == (7, [7, 7])


def test_a_rename_function_that_returns_none_is_refused(tmp_path: Path) -> None:
    ckpt.save(state(7), tmp_path)
    with pytest.raises(ckpt.InvalidArgument) as raised:
        ckpt.load(tmp_path, state(0), rename={"stage1.w": "stage1.w"}.get)
    one_line(raised, "rename=", "None", "a function must return a name")


def test_only_uses_the_names_of_like(tmp_path: Path) -> None:
    ckpt.save(state(7), tmp_path)
    rename = {r"^layers\.": "stage1."}

    def like() -> dict[str, Any]:
        return {"layers": {"w": np.zeros(3, int)}, "pair": (0, np.zeros(2, int)), "new": np.zeros(1)}

    loaded = ckpt.load(tmp_path, like(), rename=rename, only="layers.*")
    assert loaded["layers"]["w"].tolist() == [7, 7, 7]
    assert (loaded["pair"][0], loaded["pair"][1].tolist(), loaded["new"].tolist()) == (0, [0, 0], [0])
    with pytest.raises(ckpt.LeafNotFound) as raised:  # the saved name, which would match nothing
        ckpt.load(tmp_path, like(), rename=rename, only="stage1.*")
    one_line(raised, "`like`", "stage1.*")
