"""Computed fragments of an erasure code are verified, since a bit may change in memory or in the processor meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.damaged_namespaces import assert_whole, content, filled_namespace, large_file
from helpers.nodes import directories
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.source_objects import SourceObjects
from ckpt.aggregator.maintenance.rebalance import drain_member
from ckpt.aggregator.maintenance.repair import repair_namespace
from ckpt.aggregator.maintenance.scrub import scrub_namespace
from ckpt.aggregator.placement.erasure import ErasureCode
from ckpt.aggregator.records.file_record import FileLayout, Fragment, MemberObject, fragment_bytes
from ckpt.storage.base.errors import IntegrityError

pytestmark = pytest.mark.slow

Arrays = Mapping[int, np.ndarray]
PATH = "d/f4"


def break_reconstruction(monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[int], bool] = lambda _: True) -> None:
    """Change one bit of each computed fragment in the calls, counted from 0, for which `is_broken` returns True."""
    reconstruct, calls = ErasureCode.reconstruct, iter(range(1_000_000))

    def broken(self: ErasureCode, fragments: Arrays, missing_fragments: Arrays) -> None:
        reconstruct(self, fragments, missing_fragments)
        if is_broken(next(calls)):
            for data in missing_fragments.values():
                data[len(data) // 3] ^= 1

    monkeypatch.setattr(ErasureCode, "reconstruct", broken)


def break_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change one bit of the first parity of each stripe of 8 MiB that is written: of the first one of PATH."""
    encode = ErasureCode.encode

    def broken(self: ErasureCode, data_fragments: Sequence[np.ndarray], parity_fragments: Sequence[np.ndarray]) -> None:
        encode(self, data_fragments, parity_fragments)
        if len(parity_fragments[0]) == 2 << 20:
            parity_fragments[0][1000] ^= 1

    monkeypatch.setattr(ErasureCode, "encode", broken)


def layout_of(namespace: Namespace, path: str = PATH) -> FileLayout:
    layout = large_file(namespace, path).layout
    assert layout is not None
    return layout


def member_of(layout: FileLayout, number: int) -> str:
    """Return the member of a fragment of the first stripe."""
    fragment = layout.stripes[0].fragments[number]
    assert fragment is not None
    return layout.objects[fragment.object_index].member


def with_lost_disks(folder: Path, numbers: Sequence[int]) -> tuple[Namespace, list[str]]:
    """Return a namespace on eight disks that has lost the disks of these fragments of a file, and the names of the disks."""
    namespace = filled_namespace(folder, "4+2", 8)
    lost = [member_of(layout_of(namespace), number) for number in numbers]
    namespace.close()
    for member in lost:
        shutil.rmtree(folder / member / "objects")
    return Namespace(directories(folder, 8, redundancy="4+2")), lost


def with_missing_fragment(folder: Path) -> tuple[Namespace, str, bytes, int]:
    """Return a namespace with a file that was written while one of six disks was unusable, its path and its content.

    The record has no checksums of the fragment that is missing. The last value is the number of this fragment.
    """
    namespace = Namespace(directories(folder, 6, redundancy="4+2"))
    namespace.put("first", b"")  # creates the namespace, with all disks
    namespace.close()
    shutil.rmtree(folder / "disk0")
    (folder / "disk0").write_text("no directory")
    namespace = Namespace(directories(folder, 6, redundancy="4+2"))
    data = content()[PATH]
    for i in range(20):
        namespace.put(f"f{i}", data)
        number = layout_of(namespace, f"f{i}").stripes[0].fragments.index(None)
        if number < 4:  # a data fragment, so that a read has to compute it
            return namespace, f"f{i}", data, number
    raise AssertionError("no file lacks a data fragment")


@pytest.mark.parametrize("numbers", [(0,), (1, 2), (1, 4)])
@pytest.mark.parametrize(("position", "count"), [(0, 9_000_000), (100, 50), (300_000, 270_000)])
def test_a_read_returns_no_wrong_computed_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int, count: int, numbers: tuple[int, ...]
) -> None:
    namespace, lost = with_lost_disks(tmp_path, numbers)
    layout = layout_of(namespace)
    start = numbers[0] * fragment_bytes(layout.stripes[0].nbytes, layout.redundancy) + position
    expected = content()[PATH][start : start + count]
    buffer = bytearray(len(expected))
    with namespace.open(PATH) as reader:
        with monkeypatch.context() as patched:
            break_reconstruction(patched)
            with pytest.raises(IntegrityError) as failed:
                reader.read_into(start, memoryview(buffer))
        assert str(failed.value).startswith(f"{PATH} in ckpt://test: ")
        assert f"fragment {numbers[0]} of {lost[0]}" in str(failed.value)
        assert reader.read_into(start, memoryview(buffer)) == len(expected)
        assert buffer == expected
        with monkeypatch.context() as patched:  # a fault that passes: the bytes are computed once more
            break_reconstruction(patched, lambda call: call == 0)
            buffer = bytearray(len(expected))
            assert reader.read_into(start, memoryview(buffer)) == len(expected)
            assert buffer == expected
    namespace.close()


@pytest.mark.parametrize("numbers", [(0,), (3,), (5,)])
def test_a_read_and_a_repair_leave_out_parity_that_was_wrong_when_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    """The record has the checksums of the wrong bytes, so only the result of the computation shows the fault."""
    with monkeypatch.context() as patched:
        break_parity(patched)
        namespace, _ = with_lost_disks(tmp_path, numbers)
    assert namespace.get(PATH) == content()[PATH]
    assert not repair_namespace(namespace, scrub_namespace(namespace)).failed
    assert_whole(namespace, "4+2")
    namespace.close()


def test_a_read_has_no_other_fragments_than_wrong_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the wrong parity and one of the others are needed."""
    with monkeypatch.context() as patched:
        break_parity(patched)
        namespace, lost = with_lost_disks(tmp_path, (0, 5))
    with pytest.raises(IntegrityError, match=f"fragment 0 of {lost[0]}"):
        namespace.get(PATH)
    done = repair_namespace(namespace, scrub_namespace(namespace))
    assert f"fragment 0 of {lost[0]}" in done.failed[PATH]
    namespace.close()


@pytest.mark.parametrize("numbers", [(0,), (5,), (1, 4)])
def test_a_repair_writes_no_wrong_computed_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    namespace, lost = with_lost_disks(tmp_path, numbers)
    before = namespace.stat(PATH)
    with monkeypatch.context() as patched:
        break_reconstruction(patched)
        done = repair_namespace(namespace, scrub_namespace(namespace))
    assert done.failed[PATH].startswith(f"{PATH} in ckpt://test: ")
    assert f"fragment {numbers[0]} of {lost[0]}" in done.failed[PATH]
    assert namespace.stat(PATH) == before
    with monkeypatch.context() as patched:  # a fault that passes
        break_reconstruction(patched, lambda call: call == 0)
        done = repair_namespace(namespace, scrub_namespace(namespace))
    assert not done.failed
    assert_whole(namespace, "4+2")
    namespace.close()


def test_a_missing_fragment_without_checksums_is_verified_by_one_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace, path, data, number = with_missing_fragment(tmp_path)
    assert namespace.get(path) == data
    for is_broken in (lambda _: True, lambda call: call % 2 == 0):  # the computation, and also its verification
        with monkeypatch.context() as patched:
            break_reconstruction(patched, is_broken)
            with pytest.raises(IntegrityError, match=f"missing fragment {number}"):
                namespace.get(path)
    namespace.close()
    (tmp_path / "disk0").unlink()
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    with monkeypatch.context() as patched:
        break_reconstruction(patched)
        done = repair_namespace(namespace, scrub_namespace(namespace))
    assert f"missing fragment {number}" in done.failed[path]
    assert layout_of(namespace, path).stripes[0].fragments[number] is None
    done = repair_namespace(namespace, scrub_namespace(namespace))
    assert not done.failed
    assert scrub_namespace(namespace, verify=True).is_whole
    assert namespace.get(path) == data
    namespace.close()


def test_a_lost_parity_that_was_wrong_when_it_was_written_is_not_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right parity differs from the record, like a wrong result. The file can be read, so it can be written again."""
    with monkeypatch.context() as patched:
        break_parity(patched)
        namespace, lost = with_lost_disks(tmp_path, (4,))
    done = repair_namespace(namespace, scrub_namespace(namespace))
    assert f"fragment 4 of {lost[0]}" in done.failed[PATH]
    for path, data in content().items():
        assert namespace.get(path) == data
        namespace.put(path, data)
    assert not repair_namespace(namespace, scrub_namespace(namespace)).failed
    require_whole(namespace, verify=True)
    namespace.close()


@pytest.mark.parametrize("redundancy", ["1x", "2x", "4+2"])
def test_a_drain_moves_no_bytes_that_changed_after_they_were_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redundancy: str
) -> None:
    namespace = filled_namespace(tmp_path, redundancy, 8)
    before, member = namespace.stat(PATH), member_of(layout_of(namespace), 0)
    read = SourceObjects.read

    def read_and_change(self: SourceObjects, member_object: MemberObject, fragment: Fragment, data: np.ndarray) -> None:
        read(self, member_object, fragment, data)
        data[len(data) // 2] ^= 1

    with monkeypatch.context() as patched:
        patched.setattr(SourceObjects, "read", read_and_change)
        done = drain_member(namespace, member)
    assert done.failed[PATH].startswith(f"{PATH}: a new fragment 0 differs from the one on {member}; ")
    assert namespace.stat(PATH) == before
    assert not drain_member(namespace, member).failed
    require_whole(namespace, verify=True)
    assert namespace.get(PATH) == content()[PATH]
    namespace.close()
