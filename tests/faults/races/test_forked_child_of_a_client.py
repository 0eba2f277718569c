"""A forked child of a process that has used nodes or a bucket, without the threads of gRPC and obstore."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.nodes import node_processes
from helpers.processes import finish, python

pytest_plugins = ["helpers.moto_server"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

_CODE = """
import gc, os, signal, sys
import numpy as np
import ckpt
from ckpt.storage import urls

url = sys.argv[1]

def status_of(work):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.alarm(300)  # a call that never returns in native code can't be interrupted otherwise
        try:
            work()
        except ckpt.StoreError as error:
            assert f"it was forked from process {os.getppid()}, which has used" in str(error), error
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.fixture(params=["nodes", "bucket"])
def url(tmp_path: Path, request: pytest.FixtureRequest):
    if request.param == "bucket":
        yield f"{request.getfixturevalue('bucket')}/run"
        return
    with node_processes(tmp_path, 2) as nodes:
        yield f"ckpt://{','.join(node.address for node in nodes)}/run"


def test_a_load_in_the_child_is_refused(url: str) -> None:
    """Otherwise it would never return."""
    code = f"""{_CODE}
ckpt.save({{"x": np.arange(1000)}}, url, step=0)
opened = ckpt.open(url)
assert status_of(lambda: ckpt.load(url)) == 7
assert status_of(lambda: opened[0].load()) == 7
assert ckpt.load(url)["x"].sum() == 499500
"""
    finish(python(code, url))


def test_a_child_frees_nothing_of_its_parent(url: str) -> None:
    """At its end, and in a garbage collection: the library would abort the process, or wait for its threads."""
    code = f"""{_CODE}
gc.disable()
store = urls.open_store(url)
store.put("a", b"1")
cycle = [store]
cycle.append(cycle)

def collect():
    gc.collect()
    os._exit(0)

assert status_of(lambda: sys.exit(5)) == 5
del store, cycle
assert status_of(collect) == 0
"""
    finish(python(code, url))


def test_a_garbage_collection_in_the_child_does_not_free_a_call_of_its_parent(tmp_path: Path) -> None:
    """The exception of a failed call, for example, refers to its call in a cycle."""
    code = f"""{_CODE}
import pathlib
import pyarrow.flight as flight
from ckpt.storage.node import wire
from ckpt.storage.node.client import NodeStore
from helpers.nodes import LocalNode

gc.disable()
store = NodeStore(LocalNode(pathlib.Path(sys.argv[1])).address)
descriptor = flight.FlightDescriptor.for_command(wire.pack(["upload", 1, b""]))
upload = store.next_connection().do_put(descriptor, wire.SCHEMA, store.call_options())
cycle = [upload]
cycle.append(cycle)
del upload, cycle

def collect():
    gc.collect()
    os._exit(0)

assert status_of(collect) == 0
os._exit(0)
"""
    finish(python(code, tmp_path))


def test_a_worker_of_a_data_loader_raises_the_error(url: str) -> None:
    pytest.importorskip("torch")
    code = f"""{_CODE}
import torch
ckpt.save({{"x": np.arange(1000)}}, url, step=0)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, number):
        return int(ckpt.load(url)["x"][number])

def samples(how):
    return [int(x) for x in torch.utils.data.DataLoader(Samples(), num_workers=1, multiprocessing_context=how)]

try:
    samples("fork")
except ckpt.StoreError as error:
    assert "multiprocessing_context=" in str(error)
else:
    sys.exit("no error")
"""
    finish(python(code, url))


def test_a_child_uses_the_namespace_of_its_parent_where_that_needs_no_such_library(tmp_path: Path) -> None:
    """A member that is a directory is called on threads, which the child starts for itself."""
    code = f"""{_CODE}
from pathlib import Path
from helpers.nodes import directories
from ckpt.aggregator.file_io.namespace import Namespace
namespace = Namespace(directories(Path(url), 3))
for number in range(20):
    namespace.put(f"a{{number}}", bytes(100_000))

def use():
    assert namespace.get("a3") == bytes(100_000)
    namespace.put("b", b"child")
    os._exit(0)

assert status_of(use) == 0
assert namespace.get("b") == b"child"
"""
    finish(python(code, tmp_path))


def test_a_child_starts_threads_for_the_pools_of_its_parent(tmp_path: Path) -> None:
    """Otherwise its calls would wait for idle threads of the parent."""
    code = f"""{_CODE}
from ckpt.storage.base.threads import DaemonThreadPool
pool = DaemonThreadPool(2, "pool")
assert [pool.submit(lambda: 3).result() for _ in range(10)] == [3] * 10

def use():
    assert pool.submit(os.getpid).result() == os.getpid()
    os._exit(0)

assert status_of(use) == 0
assert pool.submit(os.getpid).result() == os.getpid()
"""
    finish(python(code, tmp_path))


def test_children_that_are_forked_during_writes_use_the_namespace(tmp_path: Path) -> None:
    """At a fork, another thread may be in a call of SQLite, whose locks nobody would free in the child."""
    code = f"""{_CODE}
import threading
from pathlib import Path
from helpers.nodes import directories
from ckpt.aggregator.file_io.namespace import Namespace
namespace = Namespace(directories(Path(url), 3))
namespace.put("a", bytes(100_000))
written, ends = [], threading.Event()

def write():
    while not ends.is_set():
        namespace.put("b", bytes(1000))
        written.append(1)

def use():
    assert namespace.get("a") == bytes(100_000)
    os._exit(0)

writer = threading.Thread(target=write)
writer.start()
for number in range(30):
    while len(written) < 3 * number:
        ends.wait(0.001)
    assert status_of(use) == 0, number
ends.set()
writer.join()
"""
    finish(python(code, tmp_path))


def test_a_child_uses_a_store_in_its_memory(bucket: str) -> None:
    """obstore needs no threads for it, also if the parent has used a bucket."""
    code = f"""{_CODE}
ckpt.save({{"x": np.arange(10)}}, url + "/run", step=0)
store = urls.open_store("memory://here")
store.put("a", b"1")

def use():
    assert store.get("a") == b"1"
    store.put("b", b"2")
    assert [entry.name for entry in store.list()] == ["a", "b"]
    os._exit(0)

assert status_of(use) == 0
"""
    finish(python(code, bucket))
