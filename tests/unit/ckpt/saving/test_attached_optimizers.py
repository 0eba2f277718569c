"""The memory of attached optimizers: which tensors a save may copy during the next forward and backward."""

from __future__ import annotations

import gc
import weakref
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.saving.attached_optimizers import AttachedOptimizers
from ckpt.state.leaves import as_leaf

torch = pytest.importorskip("torch")


def attached(*tensors: Any) -> AttachedOptimizers:
    found = AttachedOptimizers(lambda *_: None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(t) for t in tensors], lr=0.1)
    found.add(optimizer)
    found.find_memory()
    return found


def is_deferred(optimizers: AttachedOptimizers, value: Any) -> bool:
    leaf = as_leaf(value)
    assert leaf is not None
    return optimizers.has(leaf)


def test_views_within_a_parameter_belong_to_the_optimizer() -> None:
    flat = torch.zeros(100)
    optimizers = attached(flat[10:90])
    for view in (flat[10:90], flat[10:20], flat[50:70].view(4, 5), flat[89:90], flat[20:40].view(torch.int32), flat[10:90:3]):
        assert is_deferred(optimizers, view)


def test_memory_beyond_a_parameter_does_not_belong_to_the_optimizer() -> None:
    """The gradients, for example, may lie in the same buffer, and the next backward changes them."""
    flat = torch.zeros(100)
    optimizers = attached(flat[10:90])
    for view in (flat, flat[:10], flat[90:], flat[9:20], flat[80:91], flat[10:], flat[10:100:40], torch.zeros(80)):
        assert not is_deferred(optimizers, view)


def test_a_view_across_several_parameters_belongs_to_the_optimizer_if_they_leave_no_gap() -> None:
    flat = torch.zeros(100)
    optimizers = attached(flat[:10], flat[10:30], flat[25:40], flat[50:60])
    assert is_deferred(optimizers, flat[5:35])
    assert is_deferred(optimizers, flat[:40])
    assert not is_deferred(optimizers, flat[35:55])
    assert not is_deferred(optimizers, flat[:60])


def test_the_columns_of_an_attached_view_belong_to_the_optimizer_and_the_gaps_do_not() -> None:
    whole = torch.zeros(8, 8)
    transposed = attached(whole.t())
    assert is_deferred(transposed, whole)
    columns = attached(whole[:, ::2])
    assert not is_deferred(columns, whole)
    assert not is_deferred(columns, whole[0, 1:3])


def test_moments_belong_to_the_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(20))
    optimizer = torch.optim.Adam([weight])
    optimizers = AttachedOptimizers(lambda *_: None)
    optimizers.add(optimizer)
    weight.sum().backward()
    optimizer.step()
    optimizers.find_memory()
    assert is_deferred(optimizers, optimizer.state[weight]["exp_avg"][7:13])
    assert not is_deferred(optimizers, weight.grad)


def test_memory_is_found_again_at_each_save() -> None:
    flat, new = torch.zeros(100), torch.zeros(100)
    weight = torch.nn.Parameter(flat[:50])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizers = AttachedOptimizers(lambda *_: None)
    optimizers.add(optimizer)
    optimizers.find_memory()
    weight.data = new[50:]
    optimizers.find_memory()
    assert is_deferred(optimizers, new[60:70])
    assert not is_deferred(optimizers, flat[10:20])


def test_an_optimizer_that_the_training_replaces_is_released() -> None:
    optimizers = AttachedOptimizers(lambda *_: None)
    parameter = torch.nn.Parameter(torch.zeros(4))
    old, new = torch.optim.SGD([parameter], lr=0.1), torch.optim.SGD([parameter], lr=0.1)
    optimizers.add(old)
    optimizers.add(new)
    released = weakref.ref(old)
    del old
    gc.collect()
    assert released() is None
    optimizers.find_memory()
    assert is_deferred(optimizers, parameter)


def test_a_parameter_without_memory_has_none() -> None:
    """FSDP resizes the storage of a parameter to 0, and later to its full size."""
    flat = torch.zeros(100)
    weight = flat[20:]
    flat.untyped_storage().resize_(0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(each) for each in (weight, torch.zeros(0), torch.zeros(4))], lr=0.1)
    optimizers = AttachedOptimizers(lambda *_: None)
    optimizers.add(optimizer)
    optimizers.find_memory()
    assert not any(is_deferred(optimizers, other) for other in (torch.zeros(100), torch.zeros(4)))
    flat.untyped_storage().resize_(400)
    optimizers.find_memory()
    assert is_deferred(optimizers, flat[30:40])


@given(st.data())
def test_a_tensor_is_deferred_only_if_the_optimizer_has_all_of_its_elements(data: st.DataObject) -> None:
    flat = torch.arange(24)

    def view(of: Any) -> Any:
        shape = data.draw(st.sampled_from([(1,), (3,), (4,), (6,), (2, 3), (3, 2), (2, 2, 2)]))
        steps = data.draw(st.sampled_from([s for s in product((1, 2, 3, 4), repeat=len(shape)) if _fits(shape, s)]))
        room = 24 - sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        return of.as_strided(shape, steps, data.draw(st.integers(0, room - 1)))

    parts = [view(flat.double()) for _ in range(data.draw(st.integers(1, 4)))]
    buffer = flat.double()
    parts = [buffer.as_strided(p.shape, p.stride(), p.storage_offset()) for p in parts]
    leaf = view(buffer)
    covered = set().union(*(p.flatten().tolist() for p in parts))
    has = is_deferred(attached(*parts), leaf)
    assert not has or set(leaf.flatten().tolist()) <= covered
    if leaf.is_contiguous() and any(p.is_contiguous() and _contains(p, leaf) for p in parts):
        assert has


def _fits(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    return int(np.dot(np.array(shape) - 1, steps)) < 24


def _contains(outer: Any, inner: Any) -> bool:
    first, last = inner.flatten()[[0, -1]].tolist()
    return bool(outer.flatten()[0] <= first and last <= outer.flatten()[-1])
