"""etcd is lost for a while, or for good."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from helpers.etcd_server import EtcdProcess, needs_etcd
from helpers.host_runs import Job, assert_result
from helpers.processes import until

from ckpt.recovery.ranks import processes


@needs_etcd
def test_a_run_survives_etcd_being_away_for_a_while(tmp_path: Path) -> None:
    """The ranks continue; failures meanwhile are handled afterwards, and no host is taken for lost."""
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    run = Job(tmp_path / "job", f"etcd://{server.endpoint.removeprefix('http://')}/lab", steps=240)
    try:
        for name in "abc":
            run.start(name)
        run.until_step(12)
        before = max(run.steps_done(0))
        server.kill()
        time.sleep(4.5)
        until(lambda: max(run._step(run.folder / f"at-0-{rank}") for rank in range(6)) > before + 20)
        assert all(processes.process_state(run.pid(rank)) for rank in range(6))
        os.kill(run.pid(2), signal.SIGKILL)
        waits = "rank 2 was killed by SIGKILL; what is done about it is decided when the run log answers"
        until(lambda: any(waits in run.messages(name) for name in "abc"))
        server.start()
        assert set(run.ends(*"abc").values()) == {0}
        log = run.log()
        assert [(e.facts["cause"], e.facts["ranks"]) for e in log if e.kind == "failure"] == [("signal", [2])]
        assert_result(run, 6)
        assert sum(run.messages(name).count(waits) for name in "abc") == 1
    finally:
        run.close()
        server.kill()
        shutil.rmtree(server.folder, ignore_errors=True)


@needs_etcd
def test_hosts_without_etcd_report_it_and_end_when_asked(tmp_path: Path) -> None:
    """Each host reports its state, and ends when it is asked to."""
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    run = Job(tmp_path / "job", f"etcd://{server.endpoint.removeprefix('http://')}/lab", "--grace", "1", hosts=2, steps=120)
    try:
        for name in "ab":
            run.start(name)
        run.until_step(5)
        server.kill()
        run.release()
        ended = "all ranks of this host have ended with success; the run ends when the run log answers, or by another signal"
        until(lambda: all((run.folder / f"end-{rank}.npy").exists() for rank in range(4)))
        time.sleep(4)  # the ranks end first, and then their agents detect it
        for agent in run.agents.values():
            agent.send_signal(signal.SIGTERM)
        assert run.ends(*"ab") == dict.fromkeys("ab", 128 + signal.SIGTERM)
        for name in "ab":
            assert run.messages(name).count(ended) == 1
            assert "SIGTERM: without the run log the ranks can't be asked to save; they are ended within 7 s" in run.messages(
                name
            )
        assert_result(run, 4)
    finally:
        run.close()
        server.kill()
