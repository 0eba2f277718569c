"""A bucket as a store, through obstore: S3 and servers with its protocol, Google Cloud Storage, Azure.

An object store makes a whole object visible at once, and an acknowledged put is durable, so there are no temporary names and no
fsync. A put may have a condition (If-None-Match, If-Match), by which a new writer fences an old one; `base/fencing_probe.py`
checks that the server honours it. A writer is a multipart upload. A killed process can leave the parts of an upload, invisible
but billed; a lifecycle rule of the bucket (AbortIncompleteMultipartUpload) deletes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ckpt.storage.base.conditional_store import RESERVATION_BYTES, ConditionalStore
from ckpt.storage.base.errors import AlreadyExists, NotFound, Refused, StoreError, UnknownScheme
from ckpt.storage.base.forks import ThreadedLibrary
from ckpt.storage.base.store import Buffer, Entry, Reader, Version, Writer, check_name, is_name, require_length
from ckpt.storage.remote.multipart_writer import CONCURRENCY, PART_BYTES, MultipartWriter

_CLIENT_DEFAULTS = {"timeout": "120s"}
"""The timeout is that of one request: the 30 s of obstore are too short for eight concurrent parts on a slow line."""

# obstore ignores the environment if it is given options, so ckpt reads these variables: AWS_ALLOW_HTTP, GOOGLE_PROXY_URL, …
_CLIENT_OPTIONS = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type", "http1_only",
    "http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "http2_only",
    "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url",
    "randomize_addresses", "timeout", "user_agent",
)  # fmt: skip

_RETRY_CONFIG: Mapping[str, object] | None = None  # the default of obstore: ten times within three minutes, with growing pauses

ObjectTag = dict[str, str]
"""The identifiers that a server gave to the content of an object: `e_tag`, and `version` where it has versions."""

_DELETE_BATCH = 1000  # names in one DeleteObjects request

# If one of these variables is set, obstore finds the credentials itself.
_AWS_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)

_METADATA_SERVICE = "169.254.169.254"  # the last source of credentials: a failure there means that none were found

_OBSTORE = ThreadedLibrary("obstore")

_NO_BUCKET_MESSAGES = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")


class ObjectStore(ConditionalStore):
    """A bucket, or a folder of one: `s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder`.

    Credentials come from the environment (AWS_*, GOOGLE_*, AZURE_*; AWS_ENDPOINT_URL for servers other than Amazon's). For S3,
    boto3 provides them otherwise, if it is installed: profiles, SSO, instance roles.
    """

    is_remote = True

    _unused_version: Version = {"e_tag": f'"{"0" * 32}"', "version": "1"}

    def __init__(self, url: str) -> None:
        self.url = url if url.endswith("://") else url.rstrip("/")
        self._store = _connect(self.url)

    @property
    def device(self) -> str:
        """The bucket, and the endpoint if it is set."""
        bucket = "/".join(self.url.split("/")[:3])
        endpoint = _s3_endpoint()
        return f"{bucket} at {endpoint}" if endpoint else bucket

    # --- writing -----------------------------------------------------------------------------------------------

    def put(self, name: str, data: Buffer) -> None:
        with self._convert_errors("writing", name):
            self._store.put(check_name(name), memoryview(data).cast("B"), chunk_size=PART_BYTES)

    def put_new(self, name: str, data: Buffer) -> None:
        """As in `Store`. After a StoreError other than AlreadyExists the put may have succeeded; read the object to know."""
        with self._convert_errors("writing", name):
            self._store.put(check_name(name), memoryview(data).cast("B"), mode="create")

    def put_if(self, name: str, data: Buffer, tag: ObjectTag | None) -> bool:
        """Replace an object only if it still has this tag of `get_tagged` (None: only if it does not exist).

        Returns whether it was replaced. False may also mean that a put succeeded without an answer and was repeated; read the
        object to know.
        """
        return self._compare_and_swap(name, data, tag) is not None

    def _compare_and_swap(self, name: str, data: Buffer, expected: Version | None) -> Version | None:
        mode: str | ObjectTag = "create" if expected is None else expected
        try:
            with self._convert_errors("writing", name, can_be_missing=True):
                put = self._store.put(check_name(name), memoryview(data).cast("B"), mode=mode, use_multipart=False)
        except (AlreadyExists, NotFound):
            return None
        return _version_tag(put)

    def move(self, name: str, to: str) -> None:
        """Rename an object if it exists, by a copy that the server makes."""
        try:
            with self._convert_errors("moving", name, can_be_missing=True):
                self._store.rename(check_name(name), check_name(to))
        except NotFound:
            pass

    def copy(self, name: str, to: str) -> None:
        """Store an object again under another name, by a copy that the server makes; raise NotFound."""
        with self._convert_errors("copying", name, can_be_missing=True):
            self._store.copy(check_name(name), check_name(to))

    def create(self, name: str, size_hint: int = 0) -> Writer:
        check_name(name)

        def put(data: bytes | Iterator[bytes], part_bytes: int) -> None:
            with self._convert_errors("uploading", name):
                self._store.put(name, data, chunk_size=part_bytes, max_concurrency=CONCURRENCY)

        return MultipartWriter(f"{self.url}/{name}", put, size_hint)

    # --- reading -----------------------------------------------------------------------------------------------

    def _read(self, name: str, limit: int | None = None) -> tuple[bytes, Version]:
        return self.get_tagged(name, limit)

    def get_tagged(self, name: str, limit: int | None = None) -> tuple[bytes, ObjectTag]:
        """Return a whole object and its tag for `put_if`; raise NotFound, and IntegrityError beyond `limit` bytes."""
        check_name(name)
        with self._convert_errors("reading", name, can_be_missing=True):
            found = self._store.get(name)
            require_length(f"{self.url}/{name}", found.meta["size"], limit)
            return bytes(found.bytes()), _version_tag(found.meta)

    def tag(self, name: str) -> ObjectTag:
        """Return the tag of an object for `put_if`; raise NotFound."""
        with self._convert_errors("looking up", name, can_be_missing=True):
            return _version_tag(self._store.head(check_name(name)))

    def modified_at(self, name: str) -> float:
        """Return when an object was written, by the clock of the server, in seconds since 1970."""
        with self._convert_errors("looking up", name, can_be_missing=True):
            when: float = self._store.head(check_name(name))["last_modified"].timestamp()
            return when

    def list_with_times(self, folder: str) -> Iterator[tuple[str, int, float]]:
        """Yield name, length and time of writing (seconds since 1970) of every object in a folder."""
        with self._convert_errors("listing", folder):
            for page in self._store.list(check_name(folder), chunk_size=1000):
                for found in page:
                    if is_name(found["path"]):
                        yield found["path"], found["size"], found["last_modified"].timestamp()

    def open(self, name: str) -> Reader:
        """Open an object without a request; the first read raises NotFound if it does not exist."""
        return _ObjectReader(self, check_name(name))

    def exists(self, name: str) -> bool:
        try:
            return self._object_bytes(check_name(name)) != RESERVATION_BYTES or not self._is_reserved(name)
        except NotFound:
            return False

    def list(self, prefix: str = "") -> Iterator[Entry]:
        folder = check_name(prefix) if prefix else None
        with self._convert_errors("listing", prefix):
            for page in self._store.list(folder, chunk_size=1000):
                for found in page:
                    if is_name(found["path"]):
                        yield Entry(found["path"], found["size"])

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        folder = check_name(prefix) if prefix else None
        with self._convert_errors("listing", prefix):
            found = self._store.list_with_delimiter(folder)["common_prefixes"]
        for path in found:
            if is_name(path):
                yield path.rpartition("/")[2]

    def _object_bytes(self, name: str) -> int:
        with self._convert_errors("looking up", name, can_be_missing=True):
            size: int = self._store.head(name)["size"]
            return size

    def _read_range(self, name: str, position: int, nbytes: int) -> Any:
        with self._convert_errors("reading", name, can_be_missing=True):
            return self._store.get_range(name, start=position, length=nbytes)

    # --- deleting ----------------------------------------------------------------------------------------------

    def delete(self, names: Iterable[str]) -> None:
        every = [check_name(name) for name in names]
        for start in range(0, len(every), _DELETE_BATCH):
            batch = every[start : start + _DELETE_BATCH]
            try:
                with self._convert_errors("deleting", batch[0], can_be_missing=True):
                    self._store.delete(batch)
            except NotFound:
                # S3 ignores a missing object. Google and Azure report it, and may not have deleted the others.
                self._delete_singly(batch)

    def _delete_singly(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                with self._convert_errors("deleting", name, can_be_missing=True):
                    self._store.delete(name)
            except NotFound:
                pass

    # --- errors ------------------------------------------------------------------------------------------------

    @contextmanager
    def _convert_errors(self, action: str, name: str, *, can_be_missing: bool = False) -> Iterator[None]:
        """Convert errors of obstore to those of ckpt. can_be_missing: an error may mean that the object does not exist."""
        from obstore import exceptions

        where = f"{action} {self.url}/{name}"
        if not self.url.startswith("memory:"):  # a store in memory needs no threads
            _OBSTORE.require_usable(self.url)
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise AlreadyExists(f"{where}: it exists already") from error
        except FileNotFoundError as error:
            if can_be_missing and not any(mark in str(error) for mark in _NO_BUCKET_MESSAGES):
                raise NotFound(f"{where}: no such object") from error
            raise Refused(f"{where} failed: the bucket does not exist; create it or correct the URL") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise Refused(f"{where} failed: {_first_line(error)}; {_credentials_advice(self.url)}") from error
        except (exceptions.BaseError, OSError) as error:
            kind: type[StoreError] = Refused
            if any(mark in str(error) for mark in _NO_BUCKET_MESSAGES):
                advice = "the bucket does not exist; create it or correct the URL"
            elif "credential" in str(error).lower() or _METADATA_SERVICE in str(error):
                advice = _credentials_advice(self.url)
            else:
                kind = StoreError
                advice = _network_advice(self.url, error)
            raise kind(f"{where} failed: {_first_line(error)}; {advice}") from error


def _version_tag(meta: Any) -> ObjectTag:
    """Return the identifiers that the server gave to this content of an object."""
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key) is not None}


class _ObjectReader(Reader):
    """Reads ranges of an object, each by one request."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name

    def read_into(self, position: int, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        try:
            data = np.frombuffer(self._store._read_range(self._name, position, len(buffer)), np.uint8)
        except NotFound:
            raise
        except StoreError:
            # Each protocol has a different error for a range beyond the end, so compare with the length of the object.
            if position >= self._store._object_bytes(self._name):
                return 0
            raise
        # A range is short only at the end of the object. numpy lets other threads run while it copies.
        np.frombuffer(buffer, np.uint8)[: len(data)] = data
        return len(data)


def _connect(url: str) -> Any:
    try:
        from obstore import exceptions
        from obstore.store import from_url
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise UnknownScheme(f'{url}: {scheme}:// needs the package obstore; run: pip install "ckpt-store[s3]"') from error
    options: dict[str, Any] = {"client_options": _client_options(url), "retry_config": _RETRY_CONFIG}
    if url.startswith(("s3://", "s3a://")):
        endpoint = _s3_endpoint()
        if endpoint:
            options["endpoint"] = endpoint
        if endpoint.startswith("http://"):
            options["client_options"].setdefault("allow_http", True)
        if not any(os.environ.get(name) for name in _AWS_CREDENTIALS):
            options.update(_boto3_credentials())
    try:
        return from_url(url, **options)
    except (exceptions.BaseError, ValueError) as error:
        advice = "write scheme://bucket/folder and set what is missing"
        raise Refused(f"{url} cannot be opened: {_first_line(error)}; {advice}") from error


def _s3_endpoint() -> str:
    """Return the URL of a server other than Amazon's, "" if the environment names none."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


def _boto3_credentials() -> dict[str, object]:
    """Return the credentials that boto3 finds (profiles, SSO, instance roles); empty if boto3 is missing or finds none."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return {}
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # boto3 has none: obstore asks the metadata service of the instance, and reports if that fails
        return {}


def _variable_prefix(url: str) -> str:
    """Return the prefix of the environment variables for a URL."""
    scheme = url.partition("://")[0]
    return "AWS" if scheme in ("s3", "s3a") else "GOOGLE" if scheme == "gs" else "AZURE"


def _client_options(url: str) -> dict[str, str]:
    """Return the client options for a URL: those of the environment, else the defaults of ckpt."""
    named = {key: f"{_variable_prefix(url)}_{key.upper()}" for key in _CLIENT_OPTIONS}
    return _CLIENT_DEFAULTS | {key: os.environ[name] for key, name in named.items() if os.environ.get(name)}


_CREDENTIAL_VARIABLES = {
    "AWS": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)",
    "GOOGLE": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT (the path of a key file)",
    "AZURE": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY (or AZURE_CLIENT_ID, "
    "AZURE_CLIENT_SECRET and AZURE_TENANT_ID)",
}
_ENDPOINT_VARIABLES = {"AWS": "AWS_ENDPOINT_URL", "GOOGLE": "GOOGLE_BASE_URL", "AZURE": "AZURE_STORAGE_ENDPOINT"}


def _credentials_advice(url: str) -> str:
    where = "container" if _variable_prefix(url) == "AZURE" else "bucket"
    return f"set {_CREDENTIAL_VARIABLES[_variable_prefix(url)]}, and check the {where}'s policy"


def _network_advice(url: str, error: BaseException) -> str:
    cloud = _variable_prefix(url)
    if "builder error" in str(error):  # no request was made
        return f"check the endpoint ({_ENDPOINT_VARIABLES[cloud]}); for one without TLS set {cloud}_ALLOW_HTTP=true"
    return f"check the network and the endpoint ({_ENDPOINT_VARIABLES[cloud]}); it was tried several times"


def _first_line(error: BaseException) -> str:
    """Return the first line of obstore's message; the other lines are a dump of its internals."""
    return str(error).strip().split("\n", 1)[0][:500]
