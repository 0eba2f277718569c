"""A real etcd that serves TLS, requires client certificates, or has users with passwords."""

from __future__ import annotations

import http.server
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from helpers.agent_worlds import agent
from helpers.etcd_members import FACTS, configure_namespace
from helpers.etcd_server import EtcdProcess, needs_etcd
from helpers.host_runs import Job, starts
from helpers.nodes import NodeProcess
from helpers.processes import until

from ckpt.aggregator.cluster import config, etcd
from ckpt.aggregator.cluster.etcd_access import EtcdCredentials, etcd_credentials_from_environment
from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.agent.joining import Joining, JoinRequest
from ckpt.recovery.ranks.signals import Signals
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.etcd import EtcdRunLog
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.storage.base.errors import InvalidArgument, LoginLost, Refused, StoreError, Unavailable

pytestmark = [needs_etcd, pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is missing")]

PASSWORD = "not so secret"


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, `ca` and `other`, and certificates `server` and `client` by the first, `stranger` by the second."""
    folder = tmp_path_factory.mktemp("certificates")
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName = IP:127.0.0.1\nextendedKeyUsage = serverAuth, clientAuth\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name in ("ca", "other"):
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        _openssl("req", "-x509", *key, *files, "-days", "2", "-subj", f"/O={name}")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        request, made = folder / f"{name}.csr", folder / f"{name}.pem"
        _openssl("req", *key, "-keyout", str(folder / f"{name}.key"), "-out", str(request), "-subj", f"/O={name}")
        signed_by = ["-CA", str(folder / f"{authority}.pem"), "-CAkey", str(folder / f"{authority}.key"), "-CAcreateserial"]
        _openssl("x509", "-req", "-in", str(request), *signed_by, "-out", str(made), "-days", "2", "-extfile", str(extensions))
    return folder


class SecureEtcd(EtcdProcess):
    """An etcd that serves https only."""

    def __init__(self, folder: Path, certificates: Path, *options: str) -> None:
        super().__init__(folder)
        self.endpoint = self.endpoint.replace("http://", "https://")
        self.endpoints = (self.endpoint,)
        files = ("--cert-file", str(certificates / "server.pem"), "--key-file", str(certificates / "server.key"))
        self.options = (*files, *options)


def _trust(monkeypatch: pytest.MonkeyPatch, certificates: Path, client: str = "") -> None:
    """Set the environment variables for TLS as a user does."""
    monkeypatch.setenv("CKPT_ETCD_CA_FILE", str(certificates / "ca.pem"))
    if client:
        monkeypatch.setenv("CKPT_ETCD_CERT_FILE", str(certificates / f"{client}.pem"))
        monkeypatch.setenv("CKPT_ETCD_KEY_FILE", str(certificates / f"{client}.key"))


@pytest.fixture
def requires_certificates(tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecureEtcd]:
    """Yield an etcd that answers only clients with a certificate; the environment of this process names one."""
    server = SecureEtcd(
        tmp_path / "etcd", certificates, "--client-cert-auth", "--trusted-ca-file", str(certificates / "ca.pem")
    )
    _trust(monkeypatch, certificates, "client")
    try:
        server.start()
        yield server
    finally:
        server.kill()


def test_members_run_logs_and_nodes_work_by_tls_with_a_certificate(
    requires_certificates: SecureEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = requires_certificates
    hosts = server.endpoint.removeprefix("https://")
    state = EtcdRunLog(f"etcd://{hosts}/job")
    assert state.append(0, [Draft(0, "note", "a")])
    assert [entry.text for entry in state.entries()] == ["a"]

    node = NodeProcess(tmp_path / "node", "--etcd", hosts, "--cluster", "lab")
    try:
        assert server.up() == {node.address: True}
        configure_namespace(tmp_path, monkeypatch, hosts)
        assert [member.address for member in config.find_config("lab").members] == [node.address]
        table = f'etcd = {{ ca_file = "{tmp_path / "missing"}" }}'
        configure_namespace(tmp_path, monkeypatch, hosts, table)
        with pytest.raises(InvalidArgument, match="can't be used"):
            config.find_config("lab")
    finally:
        node.close()


def test_a_client_without_a_trusted_certificate_gets_advice(
    requires_certificates: SecureEtcd, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = requires_certificates.endpoints
    for client in ("stranger", ""):
        for variable in ("CKPT_ETCD_CERT_FILE", "CKPT_ETCD_KEY_FILE"):
            monkeypatch.delenv(variable)
        _trust(monkeypatch, certificates, client)
        with pytest.raises(Unavailable, match="CKPT_ETCD_CERT_FILE"):
            EtcdClient(endpoints).range("/")
        monkeypatch.setenv("CKPT_ETCD_CERT_FILE", "x")
        monkeypatch.setenv("CKPT_ETCD_KEY_FILE", "x")
    _trust(monkeypatch, certificates, "client")
    monkeypatch.setenv("CKPT_ETCD_CA_FILE", str(certificates / "other.pem"))
    with pytest.raises(Unavailable, match="give the authority of its certificate in CKPT_ETCD_CA_FILE"):
        EtcdClient(endpoints).range("/")
    for variable in ("CKPT_ETCD_CA_FILE", "CKPT_ETCD_CERT_FILE", "CKPT_ETCD_KEY_FILE"):
        monkeypatch.delenv(variable)
    with pytest.raises(StoreError, match="CKPT_ETCD_CA_FILE"):
        EtcdClient([endpoints[0].replace("https", "http")]).range("/")


@pytest.fixture
def has_users(tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecureEtcd]:
    """Yield an etcd with authentication: root, and `trainer`, who may use the keys of one job only."""
    server = SecureEtcd(tmp_path / "etcd", certificates, "--auth-token", "simple")
    _trust(monkeypatch, certificates)
    try:
        server.start()
        anyone = EtcdClient(server.endpoints)
        for name in ("root", "trainer"):
            anyone._call("auth/user/add", {"name": name, "password": PASSWORD})
            anyone._call("auth/role/add", {"name": name})
            anyone._call("auth/user/grant", {"user": name, "role": name})
        first, after = ("L2NrcHQtcnVuL2pvYi8=", "L2NrcHQtcnVuL2pvYjA=")  # /ckpt-run/job/ and /ckpt-run/job0
        allowed = {"permType": "READWRITE", "key": first, "range_end": after}
        anyone._call("auth/role/grant", {"name": "trainer", "perm": allowed})
        anyone._call("auth/enable", {})
        yield server
    finally:
        server.kill()


def test_a_run_log_and_members_work_with_user_and_password(
    has_users: SecureEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = has_users.endpoint.removeprefix("https://")
    with pytest.raises(Refused, match="CKPT_ETCD_USER"):
        EtcdRunLog(f"etcd://{hosts}/job").entries()
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    monkeypatch.setenv("CKPT_ETCD_USER", "trainer")
    monkeypatch.setenv("CKPT_ETCD_PASSWORD_FILE", str(file))
    state = EtcdRunLog(f"etcd://{hosts}/job")
    assert state.append(0, [Draft(0, "note", "a")])
    with pytest.raises(Refused, match="permission denied"):
        EtcdRunLog(f"etcd://{hosts}/another").append(0, [Draft(0, "note", "a")])
    with caplog.at_level(logging.WARNING, "ckpt.run"):
        for minute in range(8):
            state.compact(60.0 * minute)
    assert caplog.messages == [], "this user may compact"

    has_users.kill()  # the restarted server has no tokens of before
    monkeypatch.setenv("CKPT_ETCD_USER", "root")
    has_users.start()
    assert [entry.text for entry in state.entries()] == ["a"]
    with closing(etcd.announce(has_users.endpoints, "lab", FACTS.address, FACTS, lease_seconds=2)) as announced:
        has_users.kill()
        has_users.start()
        until(lambda: announced.lease is not None and has_users.up() == {FACTS.address: True})

    file.write_text("another")
    with pytest.raises(Refused, match="authentication failed"):
        EtcdClient(has_users.endpoints).range("/")


NEW_PASSWORD = "another one"


@pytest.fixture
def password_file(has_users: SecureEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the password of `trainer`, which the environment of this process names."""
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    monkeypatch.setenv("CKPT_ETCD_USER", "trainer")
    monkeypatch.setenv("CKPT_ETCD_PASSWORD_FILE", str(file))
    return file


def _as_root(server: SecureEtcd) -> EtcdClient:
    credentials = EtcdCredentials(os.environ["CKPT_ETCD_CA_FILE"], user="root", password=PASSWORD)
    return EtcdClient(server.endpoints, credentials=credentials)


def _change_password(server: SecureEtcd) -> None:
    """Change the password of `trainer`, which also ends his logins."""
    _as_root(server)._call("auth/user/changepw", {"name": "trainer", "password": NEW_PASSWORD})


def test_a_password_file_may_be_unreadable_after_the_first_login(has_users: SecureEtcd, password_file: Path) -> None:
    """A secret that is being replaced is missing or empty for a moment."""
    url = f"etcd://{has_users.endpoint.removeprefix('https://')}/job"
    state = EtcdRunLog(url)
    assert state.append(0, [Draft(0, "note", "a")])
    _change_password(has_users)
    for unreadable, problem in ((lambda: password_file.write_text("\n"), "is empty"), (password_file.unlink, "can't be read")):
        unreadable()
        with pytest.raises(Refused, match=problem):
            state.entries()
        with pytest.raises(InvalidArgument, match=problem):
            EtcdRunLog(url).entries()
    password_file.write_text(NEW_PASSWORD)
    assert [entry.text for entry in state.entries()] == ["a"]


def test_agents_continue_while_the_password_is_replaced(has_users: SecureEtcd, password_file: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", f"etcd://{has_users.endpoint.removeprefix('https://')}/job", hosts=2)
    root, seen = _as_root(has_users), [(0.0, b"")]

    def are_silent() -> bool:
        """Return whether no agent has published a report for some seconds."""
        with suppress(StoreError):
            reports = b"".join(item.value for item in root.range("/ckpt-run/job/agents/"))
            if reports != seen[-1][1]:
                seen.append((time.monotonic(), reports))
        return time.monotonic() - seen[-1][0] > 5

    try:
        for name in "ab":
            job.start(name)
        job.until_step(5)
        password_file.unlink()
        _change_password(has_users)
        until(are_silent, "the agents can't log in")
        assert [agent.poll() for agent in job.agents.values()] == [None, None]
        password_file.write_text(NEW_PASSWORD)
        os.kill(job.pid(1), signal.SIGKILL)
        assert job.ends("a", "b") == {"a": 0, "b": 0}
        assert len(starts(job.log())) == 2
    finally:
        job.close()


def test_an_agent_that_must_log_in_again_while_it_joins_tries_again(has_users: SecureEtcd, password_file: Path) -> None:
    """Its password is replaced after its first call: the file is missing for a moment."""
    run_log = EtcdRunLog(f"etcd://{has_users.endpoint.removeprefix('https://')}/job")
    request = JoinRequest("a", RunSpec(("train",), 1, 2, 2), False, None, lambda: agent("a"))
    assert run_log.entries() == []
    password_file.unlink()
    _change_password(has_users)
    with pytest.raises(LoginLost):
        run_log.entries()
    restore = threading.Timer(2.0, lambda: password_file.write_text(NEW_PASSWORD))
    restore.start()
    try:
        joined = Joining(FollowedLog(run_log), request, Signals(), print).join()
    finally:
        restore.join()
    assert joined.run_id
    assert [entry.kind for entry in run_log.entries()] == ["run", "lead"]


def test_a_namespace_keeps_its_members_while_the_password_is_replaced(
    has_users: SecureEtcd, password_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_ETCD_USER", "root")
    configure_namespace(tmp_path, monkeypatch, has_users.endpoint.removeprefix("https://"))
    with closing(etcd.announce(has_users.endpoints, "lab", FACTS.address, FACTS)):
        members = config.find_config("lab").members
        assert [member.address for member in members] == [FACTS.address]
        password_file.unlink()
        assert config.find_config("lab").members == members
        password_file.write_text(NEW_PASSWORD)
        assert config.find_config("lab").members == members
        password_file.write_text(PASSWORD)


def test_a_password_is_sent_only_by_tls_or_to_this_host() -> None:
    access = EtcdCredentials(user="trainer", password=PASSWORD)
    with pytest.raises(InvalidArgument, match="without encryption"):
        EtcdClient(["192.0.2.1:2379"], credentials=access)
    EtcdClient(["127.0.0.1:2379", "[::1]:2379", "https://192.0.2.1:2379"], credentials=access)
    EtcdClient(["192.0.2.1:2379"], credentials=EtcdCredentials(user="trainer", password=PASSWORD, insecure=True))
    assert PASSWORD not in repr(access)


def test_an_endpoint_does_not_fall_back_to_http(certificates: Path) -> None:
    access = EtcdCredentials(ca_file=str(certificates / "ca.pem"))
    assert access.endpoint_url("h:2379") == "https://h:2379"
    with pytest.raises(InvalidArgument, match="write https://"):
        EtcdClient(["http://h:2379"], credentials=access)
    with pytest.raises(InvalidArgument, match="go together"):
        EtcdClient(
            ["h:2379"],
            credentials=EtcdCredentials(ca_file=str(certificates / "ca.pem"), cert_file=str(certificates / "client.pem")),
        )


def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.path)
            if self.path == "/v3/auth/authenticate":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"token": "a.1"}).encode())
            else:
                self.send_response(302)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

        do_GET = do_POST

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(StoreError, match="HTTP status 302"):
            EtcdClient([f"127.0.0.1:{server.server_port}"], credentials=EtcdCredentials(user="u", password="p")).range("/")
        server.shutdown()
    assert seen == ["/v3/auth/authenticate", "/v3/kv/range"]


def test_etcd_access_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_ETCD_USER", "u")
    monkeypatch.setenv("CKPT_ETCD_PASSWORD", "p")
    access = etcd_credentials_from_environment()
    assert (access.user, access.read_password()) == ("u", "p")
    assert etcd_credentials_from_environment({"user": "v"}).user == "v"


def test_ckpt_run_names_the_missing_certificate_variable(
    requires_certificates: SecureEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPT_ETCD_CERT_FILE")
    command = [sys.executable, "-m", "ckpt.tools.run", "--nnodes", "2", "--run-dir", str(tmp_path / "run"), "--no-memory"]
    state = f"etcd://{requires_certificates.endpoint.removeprefix('https://')}/job"
    done = subprocess.run([*command, "--state", state, "true"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "CKPT_ETCD_CERT_FILE and CKPT_ETCD_KEY_FILE go together" in done.stderr
