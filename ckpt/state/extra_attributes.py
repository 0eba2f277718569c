"""Refuse an array or container with attributes of its own, which a save would otherwise lose silently."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.errors import UnsupportedLeaf
from ckpt.state.frameworks import PACKAGES, framework_file
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.sharded import Shard

_FRAMEWORK_MODULES = PACKAGES | {"numpy", "ml_dtypes"}
"""Arrays of classes from these packages need no check: all that a load needs of them is stored."""

_TORCH_ATTRIBUTES = ("_is_param", "_is_buffer")
"""Attributes that torch itself sets on a tensor of a subclass that is a parameter or buffer."""


def own_attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object by name, those in slots too, without those that a cached_property can recompute."""
    kind = type(value)
    found = _instance_dict(value)
    for base in kind.__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found[name] = member.__get__(value, kind)
                except AttributeError:  # the slot is not set
                    continue
    return {k: v for k, v in found.items() if not isinstance(inspect.getattr_static(kind, k, None), functools.cached_property)}


def _instance_dict(value: object) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return {} if found is value else dict(found)  # a dict may be its own __dict__


_framework_class_cache: dict[type, bool] = {}


def require_plain_array(value: object, path: str) -> None:
    """Raise UnsupportedLeaf for an array of a user's class that has attributes of its own."""
    kind = type(value)
    known = _framework_class_cache.get(kind)
    if known is None:
        known = issubclass(kind, (Shard, ArrayLeaf)) or _is_of_framework(kind)
        _framework_class_cache[kind] = known
    if not known and (lost := own_attributes(value).keys() - set(_TORCH_ATTRIBUTES)):
        raise _lost_attributes_error(value, lost, path, "the plain array (torch: as_subclass(torch.Tensor), numpy: np.asarray)")


def _is_of_framework(kind: type) -> bool:
    if kind.__module__.partition(".")[0] in _FRAMEWORK_MODULES:
        return True
    file = framework_file(kind)
    return file is not None and hasattr(file, "is_framework_class") and bool(file.is_framework_class(kind))


def require_plain_container(value: object, path: str, stored: Mapping[str, object]) -> None:
    """Raise UnsupportedLeaf for a container or dataclass with an attribute that is not stored.

    stored: the values that are stored, by attribute name. An attribute that is None may be lost: it is an unused field.
    """
    attributes = own_attributes(value)
    if not attributes:
        return
    lost = {k for k, v in attributes.items() if v is not None and not (k in stored and stored[k] is v)}
    if lost:
        raise _lost_attributes_error(value, lost, path, "a plain dict, list or tuple")


def _lost_attributes_error(value: object, names: Iterable[str], path: str, plain: str) -> UnsupportedLeaf:
    kind = type(value)
    shown = sorted(names)
    several = len(shown) > 1
    return UnsupportedLeaf(
        f"leaf {path or '(root)'}: a {kind.__module__}:{kind.__qualname__} has {'attributes' if several else 'the attribute'} "
        f"{', '.join(shown[:3])}{' …' if len(shown) > 3 else ''} of its own, which a load would not restore: give the class "
        f"state_dict() and load_state_dict(), or store {plain} and {'those' if several else 'that'} beside it"
    )
