"""Members that are folders of this host: which folders a namespace creates."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import scrub
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.testing import random_bytes


def test_a_member_folder_whose_parent_does_not_exist_is_not_created(tmp_path: Path) -> None:
    """A typing error in the path, or a disk that is not mounted, gives no empty member on another disk."""
    missing = tmp_path / "mnt" / "disk2"
    folders = [str(tmp_path / "disk0"), str(tmp_path / "disk1"), str(missing)]
    reason = f"neither {missing} nor the folder {missing.parent} exists; mount the disk, create the folder, or correct the path"
    namespace = Namespace(config_from_table("test", {"members": folders, "redundancy": "2x"}, "the test"))
    assert not namespace.exists()
    with pytest.raises(Unavailable) as refused:
        namespace.put("a", bytes(100_000))
    assert reason in str(refused.value)
    assert not missing.parent.exists()
    namespace.close()
    missing.parent.mkdir()
    namespace = Namespace(config_from_table("test", {"members": folders, "redundancy": "2x"}, "the test"))
    files = {f"f{i}": random_bytes(100_000, i) for i in range(8)}
    for path, data in files.items():
        namespace.put(path, data)
    require_whole(namespace)
    assert missing.is_dir(), "the folder itself is created"
    namespace.close()
    missing.parent.rename(tmp_path / "away")
    namespace = Namespace(config_from_table("test", {"members": folders, "redundancy": "2x"}, "the test"))
    for path, data in files.items():
        assert namespace.get(path) == data, "a disk that is not mounted is a member that is down"
    for i in range(8):
        namespace.put(f"g{i}", files[f"f{i}"])
    found = scrub.scrub_namespace(namespace)
    assert list(found.missing_members) == [str(missing)], "it is missing, and not empty"
    for call in (namespace.open_members[str(missing)].info, namespace.open_members[str(missing)].inventory):
        with pytest.raises(Unavailable) as refused:
            call()
        assert str(refused.value) == reason
    assert not missing.parent.exists()
    (tmp_path / "away").rename(missing.parent)
    namespace.close()
    namespace = Namespace(config_from_table("test", {"members": folders, "redundancy": "2x"}, "the test"))
    for i in range(8):
        assert namespace.get(f"g{i}") == namespace.get(f"f{i}") == files[f"f{i}"]
    namespace.close()
