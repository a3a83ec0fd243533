"""A store in a bucket of S3, or of a server that speaks its protocol, through obstore.

obstore and delta-rs stand on the same Rust crate, object_store. So one dictionary of options serves
both, and their errors read alike.

- `create` is a put with `If-None-Match: *`. object_store repeats a put whose answer got lost, and then
  meets its own object. So "already there" is an error only if other content is there.
- `writer` gathers the object in memory and publishes it by the same put: a multipart upload cannot be
  conditional. So nothing is ever unfinished here.
- Trouble is told as a `ConfigError` (credentials, permissions, bucket) or a `PlatformError` (network,
  server), within bounded time. Only a missing object is a `FileNotFoundError`.
- Options are read from the environment of the process that opens the store. A pickled store has its
  address alone, never a secret.

Next: storage/store.py has the port; tests/contracts/test_store.py runs on this store, too.
"""

from __future__ import annotations

import errno
import re
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import pyarrow as pa
import xxhash
from obstore.exceptions import AlreadyExistsError, BaseError, NotModifiedError
from obstore.store import S3Store, from_url

from seriatim import config
from seriatim.errors import ConfigError, PlatformError, SeriatimError, raise_broken_promise
from seriatim.storage.store import (
    BLOCK_BYTES,
    BUCKET_SCHEME,
    AlreadyThereError,
    Buffer,
    HashingSink,
    LocalStore,
    Sink,
    open_store,
    refuse_other_content,
)

if TYPE_CHECKING:
    from obstore import GetOptions

OPTION_NAMES = frozenset(
    {
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "aws_region",
        "aws_default_region",
        "aws_endpoint",
        "aws_endpoint_url",
        "aws_endpoint_url_s3",
        "aws_virtual_hosted_style_request",
        "aws_web_identity_token_file",
        "aws_role_arn",
        "aws_role_session_name",
        "aws_endpoint_url_sts",
        "aws_container_credentials_relative_uri",
        "aws_container_credentials_full_uri",
        "aws_container_authorization_token_file",
        "aws_metadata_endpoint",
        "aws_imdsv1_fallback",
        "aws_skip_signature",
        "aws_checksum_algorithm",
        "aws_disable_bulk_delete",
        "aws_request_payer",
        "aws_server_side_encryption",
        "aws_sse_kms_key_id",
        "aws_sse_bucket_key_enabled",
    }
)
"""The options that users may set: as variables of the environment, in capital letters, or in the file
that SERIATIM_STORE_CONFIG names.
"""
GOOGLE_OPTION_NAMES = frozenset(
    {
        "google_application_credentials",
        "google_service_account",
        "google_service_account_key",
        "google_skip_signature",
    }
)
AZURE_OPTION_NAMES = frozenset(
    {
        "azure_storage_account_name",
        "azure_storage_account_key",
        "azure_storage_sas_key",
        "azure_storage_client_id",
        "azure_storage_client_secret",
        "azure_storage_tenant_id",
        "azure_storage_authority_id",
        "azure_federated_token_file",
        "azure_msi_endpoint",
        "azure_skip_signature",
    }
)
OPTION_FAMILIES = {
    "s3": ("aws_", OPTION_NAMES),
    "gs": ("google_", GOOGLE_OPTION_NAMES),
    "abfss": ("azure_", AZURE_OPTION_NAMES),
}
"""By the scheme of an address: how the names of its options begin, and which there are. Stores of Google
and Azure are opened by the same library, but were never run by us.
"""
CLIENT_OPTION_NAMES = ("connect_timeout", "timeout", "allow_http")
CREDENTIAL_SOURCES = (
    "aws_access_key_id",
    "aws_web_identity_token_file",
    "aws_container_credentials_relative_uri",
    "aws_container_credentials_full_uri",
    "aws_skip_signature",
)
"""Options each of which says where credentials come from."""
STORE_CONFIG = "SERIATIM_STORE_CONFIG"
STORE_CREDENTIALS = "SERIATIM_STORE_CREDENTIALS"
DEFAULT_REGION = "us-east-1"
DEFAULT_CHECKSUM = "sha256"
"""The digest that goes with every put, and that S3 keeps with the object. It is part of the signature
anyway, so it costs nothing.
"""
CONNECT_SECONDS = 5
REQUEST_SECONDS = 15
"""How long one try of a request may take: a server that accepts connections and says nothing."""
BULK_REQUEST_SECONDS = 120
"""The same for requests that carry a large content."""
RETRY_SECONDS = 30
"""After this time a request is not tried again."""
RETRIES_MAX = 6
BULK_BYTES = 1 << 20
"""Contents from here on are large."""
TAIL_BYTES = 256 << 10
"""What `open` reads at once from the end: the footer of a Parquet file, or the whole of a small one."""
OBJECT_BYTES_MAX = 5 << 30
"""S3 takes no larger object in one put."""
PARALLEL_REQUESTS = 8
CACHED_BYTES_MIN = 1 << 20
"""Smaller objects are not kept on this host: a request for them takes no longer than to ask whether
they are the same.
"""
CACHE_BYTES_MAX = 4 << 30
CLIENTS_MAX = 2_048
"""So many clients a process keeps. A page has one for each stream in a bucket; a new one needs new
connections.
"""

WRONG_CREDENTIALS = frozenset(
    {
        "SignatureDoesNotMatch",
        "InvalidAccessKeyId",
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
    }
)
WRONG_REGION = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
TEMPORARY_STATUSES = (408, 409, 429)
PERMISSIONS_ADVICE = (
    "check them, and give them s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"
    " (docs/DEPLOY.md)"
)
CONDITIONAL_PUTS_ADVICE = "use a store with conditional puts (If-None-Match), see docs/STORES.md"
S3_ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")
HTTP_STATUS = re.compile(r"status code\W+(?:\x1b\[\d+m\W*\x1b\[0m\s*)?(\d{3})\b")
"""The status in an error of object_store. delta-rs draws an arrow in colour before it."""


def open_object_store(address: str) -> ObjectStore:
    """The store at an address like `s3://bucket/prefix`, with the options of this process."""
    match = BUCKET_SCHEME.match(address)
    if match is None:
        raise_broken_promise("only addresses of buckets come here", address=address)
    options = store_options(config.store_environment(), match["scheme"], match["store"] or "")
    return ObjectStore(address, options)


def store_options(
    environ: Mapping[str, str], scheme: str = "s3", store: str = ""
) -> dict[str, str]:
    """The options of object_store, for obstore and delta-rs alike.

    1. AWS_* variables of the environment (GOOGLE_*, AZURE_*).
    2. The file that SERIATIM_STORE_CONFIG names, which wins.
    3. What we decide: conditional puts, time limits, plain HTTP for endpoints that begin with http://.

    A named store has its own section in the connections file in place of 1 and 2.
    """
    options: dict[str, str] = {}
    if store:
        options, environ = _named_store_options(environ, scheme, store)
    else:
        # 1. The environment.
        prefix, option_names = OPTION_FAMILIES[scheme]
        options.update(_options_of_variables(environ, option_names))
        # 2. The file.
        settings_file = environ.get(STORE_CONFIG, "")
        if settings_file:
            options |= config.read_private_settings(
                Path(settings_file), STORE_CONFIG, option_names, prefix
            )
    # 3. Ours.
    if scheme == "s3":
        _refuse_missing_credentials(options, environ, store)
        # Without a region delta-rs would ask the metadata address of AWS for one.
        options.setdefault("aws_region", options.pop("aws_default_region", DEFAULT_REGION))
        options["aws_conditional_put"] = "etag"
        options.setdefault("aws_checksum_algorithm", DEFAULT_CHECKSUM)
        # For a server that does not take it. The library refuses the word in a variable.
        if options["aws_checksum_algorithm"] == "none":
            del options["aws_checksum_algorithm"]
    elif not options:
        raise ConfigError(
            f"there are no credentials for {scheme}://",
            next=f"set {_credential_settings(scheme, store)}",
        )
    options["connect_timeout"] = f"{CONNECT_SECONDS}s"
    options["timeout"] = f"{REQUEST_SECONDS}s"
    if _endpoint(options).startswith("http://"):
        options["allow_http"] = "true"
    return options


def _options_of_variables(
    environ: Mapping[str, str], option_names: frozenset[str]
) -> dict[str, str]:
    return {
        name.lower(): value
        for name, value in environ.items()
        if name.lower() in option_names and value
    }


def _named_store_options(
    environ: Mapping[str, str], scheme: str, store: str
) -> tuple[dict[str, str], dict[str, str]]:
    """The options of a named store; and, in place of the environment, where its credentials come from
    if they are none of these.
    """
    prefix, option_names = OPTION_FAMILIES[scheme]
    options = {}
    rest = {}
    for key, value in config.named_connection("store", store, environ).items():
        name = f"{prefix}{key.removeprefix(prefix)}"
        if key == "credentials":
            rest[STORE_CREDENTIALS] = value
        elif name in option_names:
            options[name] = value
        else:
            raise ConfigError(
                f"store {store}: {key} is no option of a store",
                allowed=", ".join(sorted(option_names)),
                next=f"fix the section [store.{store}] or the SERIATIM_STORE_{store.upper()}_* variable",
            )
    # The library reads the environment by itself, also for what it is not given.
    foreign_names = _options_of_variables(environ, option_names).keys() - options.keys()
    # Without a region we say one.
    foreign_names -= {"aws_region", "aws_default_region"}
    if foreign_names:
        variables = ", ".join(name.upper() for name in sorted(foreign_names))
        raise ConfigError(
            f"store {store}: this process has variables that would change it: {variables}",
            next=f"unset them, and give the store that they are for a name, too; or set the same"
            f" options in the section [store.{store}]",
        )
    return options, rest


def _credential_settings(scheme: str, store: str) -> str:
    """Where a person sets the credentials of a store, which has a name or not."""
    if store:
        keys = "access_key_id and secret_access_key" if scheme == "s3" else "the credentials"
        place = f"in the section [store.{store}] of the file that {config.CONNECTIONS} names"
        return f"{keys} {place}, or SERIATIM_STORE_{store.upper()}_… variables"
    if scheme == "s3":
        return f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the file of {STORE_CONFIG}"
    prefix, _ = OPTION_FAMILIES[scheme]
    return f"the {prefix.upper()}… variables, or the file of {STORE_CONFIG}"


def _refuse_missing_credentials(
    options: Mapping[str, str], environ: Mapping[str, str], store: str
) -> None:
    """Refuse options that name no credentials. object_store would ask the metadata address of AWS
    for the role of this machine, which takes long where there is none. It may do so if the user says
    so, or the environment says that this is AWS.
    """
    settings = _credential_settings("s3", store)
    if ("aws_access_key_id" in options) != ("aws_secret_access_key" in options):
        raise ConfigError(
            "the credentials of the object store are incomplete",
            next=f"set both: {settings}",
        )
    if any(name in options for name in CREDENTIAL_SOURCES):
        return
    choice = environ.get(STORE_CREDENTIALS, "")
    if choice not in ("", "instance"):
        raise ConfigError(
            f"{STORE_CREDENTIALS}={choice} is not known",
            allowed="instance",
            next="fix it or unset it",
        )
    is_on_aws = bool(environ.get("AWS_EXECUTION_ENV")) or "aws_metadata_endpoint" in options
    if choice != "instance" and not is_on_aws:
        role = 'credentials = "instance" there' if store else f"{STORE_CREDENTIALS}=instance"
        advice = [f"set {settings}", f"on a machine of AWS that has a role: {role}"]
        if not store:
            advice += [
                'keys in ~/.aws are not read: eval "$(aws configure export-credentials --format env)"',
                'the server of `seriatim s3 start`: eval "$(seriatim s3 env)"',
            ]
        raise ConfigError("there are no credentials for the object store", next=";\n".join(advice))


def _endpoint(options: Mapping[str, str]) -> str:
    for name in ("aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint"):
        if name in options:
            return options[name]
    return ""


@lru_cache(maxsize=CLIENTS_MAX)
def _open_client(url: str, options: tuple[tuple[str, str], ...]) -> Any:
    """A client of obstore. It has connections of its own, so each process keeps one for all stores of
    the same address.
    """
    scheme, _, bucket_and_prefix = url.partition("://")
    bucket, _, prefix = bucket_and_prefix.partition("/")
    arguments: dict[str, Any] = {
        "config": dict(options),
        "retry_config": {
            "max_retries": RETRIES_MAX,
            "retry_timeout": timedelta(seconds=RETRY_SECONDS),
        },
    }
    try:
        if scheme == "s3":
            return S3Store(bucket, prefix=prefix or None, **arguments)
        # The stores of Google and Azure take options of the connection by themselves.
        arguments["client_options"] = {
            name: value for name, value in options if name in CLIENT_OPTION_NAMES
        }
        arguments["config"] = {
            name: value for name, value in options if name not in CLIENT_OPTION_NAMES
        }
        return from_url(url, **arguments)
    except BaseError as error:
        # The first line names the option; values are not in it.
        reason = str(error).partition("\n")[0][:200]
        raise ConfigError(
            f"{scheme}://{bucket}: the options of the store are not accepted: {reason}",
            next=f"fix the AWS_* variables or the file of {STORE_CONFIG}",
        ) from None


class ObjectStore:
    """Objects in a bucket, below a prefix."""

    is_remote = True

    def __init__(self, address: str, options: Mapping[str, str]) -> None:
        self.address = address.rstrip("/")
        store, plus, url = self.address.partition("+")
        is_named = bool(plus) and "://" not in store
        self.url = url if is_named else self.address
        self._credential_settings = _credential_settings(
            self.url.partition("://")[0], store if is_named else ""
        )
        self._options = dict(options)
        self._client = _open_client(self.url, tuple(sorted(options.items())))

    @property
    def _bulk_client(self) -> Any:
        """The client for large contents, which may take longer."""
        options = {**self._options, "timeout": f"{_bulk_seconds(self._options)}s"}
        return _open_client(self.url, tuple(sorted(options.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has its own environment, with its own credentials.
        return open_store, (self.address,)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def uri(self, key: str) -> str:
        """The address of an object."""
        return f"{self.url}/{key}"

    def create(self, key: str, content: Buffer) -> None:
        """Write an object that must not be there yet."""
        try:
            self._put(key, content, mode="create")
        except AlreadyExistsError:
            refuse_other_content(key, content, self._read_in_blocks)

    def replace(self, key: str, content: Buffer) -> None:
        """Write an object, whether it is there or not."""
        self._put(key, content, mode="overwrite")

    def _put(self, key: str, content: Buffer, *, mode: str) -> None:
        view = memoryview(content).cast("B")
        client = self._bulk_client if len(view) >= BULK_BYTES else self._client
        with self._explained(key):
            obstore.put(client, key, view, mode=mode, use_multipart=False)  # type: ignore[arg-type]

    def _read_in_blocks(self, key: str) -> bytes:
        return b"".join(self.blocks(key))

    def writer(self, key: str) -> Sink:
        """Begin a large object. It is gathered in memory."""
        return _ObjectSink(self, key)

    def read(self, key: str) -> bytes:
        """A whole object."""
        with self._explained(key):
            return bytes(obstore.get(self._client, key).bytes())

    def read_again(self, key: str, digest: str) -> bytes:
        """A whole object as it is now. A large one is kept on the disk of this host, by its digest. Then
        the server is asked whether it still has the same one, so damage in the bucket is seen as
        without the cache, and nothing is transferred twice.
        """
        cached_tag, cached_content = _cached_object(digest)
        condition: GetOptions = {"if_none_match": cached_tag} if cached_tag else {}
        with self._explained(key):
            try:
                answer = obstore.get(self._bulk_client, key, options=condition)
                content = bytes(answer.bytes())
            except NotModifiedError:
                return cached_content
        if len(content) >= CACHED_BYTES_MIN and xxhash.xxh3_128_hexdigest(content) == digest:
            _cache_object(digest, answer.meta["e_tag"] or "", content)
        return content

    def blocks(self, key: str) -> Iterator[Buffer]:
        """The content from the beginning to the end, as it arrives."""
        with self._explained(key):
            for block in obstore.get(self._bulk_client, key).stream(min_chunk_size=BLOCK_BYTES):
                yield memoryview(block)

    def open(self, key: str) -> pa.NativeFile:
        """Open an object for reading parts of it. One request tells its size and reads its end."""
        return pa.PythonFile(_ObjectReader(self, key), mode="r")

    def read_tail(self, key: str) -> tuple[int, bytes]:
        """The size of an object, and its last bytes."""
        with self._explained(key):
            try:
                answer = obstore.get(self._client, key, options={"range": {"suffix": TAIL_BYTES}})
                return answer.meta["size"], bytes(answer.bytes())
            except BaseError as error:
                # An empty object has no last bytes.
                if _http_status(str(error)) == 416:
                    return 0, b""
                raise

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """The bytes of an object from `start` to `end`."""
        client = self._bulk_client if end - start >= BULK_BYTES else self._client
        with self._explained(key):
            return bytes(obstore.get_range(client, key, start=start, end=end))

    def size(self, key: str) -> int | None:
        """The size in bytes; None if there is no such object."""
        try:
            with self._explained(key):
                return obstore.head(self._client, key)["size"]
        except FileNotFoundError:
            return None

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """The size of each object, or None. Several requests are under way at a time."""
        if len(keys) <= 1:
            return [self.size(key) for key in keys]
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as threads:
            return list(threads.map(self.size, keys))

    def keys(self, prefix: str, after: str = "") -> Iterator[tuple[str, int]]:
        """The objects below a prefix, with their sizes, sorted by key."""
        listed = []
        with self._explained(prefix):
            for page in obstore.list(self._client, prefix or None, offset=after or None):
                listed += [(item["path"], item["size"]) for item in page]
        return iter(sorted(listed))

    def stamps(self, prefix: str) -> dict[str, str]:
        """What the server calls the content of each object right below a prefix."""
        with self._explained(prefix):
            listed = obstore.list_with_delimiter(self._client, prefix or None)
        return {
            item["path"]: f"{item['e_tag']}-{item['size']}-{item['last_modified'].isoformat()}"
            for item in listed["objects"]
        }

    def folders(self, prefix: str) -> list[str]:
        """The names between the prefix and the next "/"."""
        with self._explained(prefix):
            listed = obstore.list_with_delimiter(self._client, prefix or None)
        return sorted(folder.rpartition("/")[2] for folder in listed["common_prefixes"])

    def unfinished_keys(self, prefix: str) -> Iterator[str]:
        """None: what is not finished is in the memory of its writer."""
        return iter(())

    def delete(self, keys: Iterable[str]) -> list[str]:
        """Delete objects; the keys that were there."""
        present = self._present_keys(set(keys))
        if present:
            with self._explained(present[0]):
                obstore.delete(self._client, present)
        return present

    def _present_keys(self, keys: set[str]) -> list[str]:
        """Which objects there are, sorted. One listing answers for all keys of a folder."""
        keys_by_folder: dict[str, set[str]] = defaultdict(set)
        for key in keys:
            keys_by_folder[key.rpartition("/")[0]].add(key)
        present = []
        single_keys: list[str] = []
        for folder, keys_of_folder in keys_by_folder.items():
            if len(keys_of_folder) == 1:
                single_keys += keys_of_folder
                continue
            with self._explained(folder):
                listed = obstore.list_with_delimiter(self._client, folder or None)
            present += [
                item["path"] for item in listed["objects"] if item["path"] in keys_of_folder
            ]
        sizes = self.sizes(single_keys)
        present += [key for key, size in zip(single_keys, sizes, strict=True) if size is not None]
        return sorted(present)

    def delete_unfinished(self, prefix: str, *, nested: bool = True) -> list[str]:
        """Nothing: there are no unfinished objects."""
        return []

    def copy(self, key: str, to: str) -> None:
        """Copy an object. The server's own copy would overwrite, so the content passes through here."""
        self.create(to, b"".join(self.blocks(key)))

    def delta_options(self) -> dict[str, str]:
        """The options of this store, and how often delta-rs tries again."""
        retries = {"max_retries": str(RETRIES_MAX), "retry_timeout": f"{RETRY_SECONDS}s"}
        return self._options | retries

    def refuse_if_unsafe(self) -> None:
        """Refuse a store that lets a second `create` of a key through. There are such servers, and two
        runs at once would lose commits on them.

        This also tries everything that a run needs: writing, reading, listing and deleting.
        """
        key = f"probes/{uuid.uuid4().hex}"
        self.create(key, b"first")
        try:
            self._refuse_second_create(key)
            self.keys("probes/")
        finally:
            self.delete([key])

    def _refuse_second_create(self, key: str) -> None:
        try:
            self.create(key, b"second")
        except AlreadyThereError:
            return
        raise ConfigError(
            f"{self.url}: the store overwrites an object that must not be overwritten",
            next=CONDITIONAL_PUTS_ADVICE,
        )

    def sync_delta_log(self, table: str, version: int | None = None) -> None:
        """Nothing: a put is durable when it is answered."""

    def explain_error(self, error: BaseException) -> SeriatimError | None:
        """What an error of obstore or delta-rs means for a person; None if it does not come from the
        server or the way to it.
        """
        text = str(error)
        status = _http_status(text)
        match = S3_ERROR_CODE.search(text)
        code = match[1] if match else ""
        is_of_obstore = isinstance(error, BaseError)
        if status is None and not code:
            # delta-rs has errors of its own, about the content of a log.
            return self._silence_error(text) if is_of_obstore or "HTTP error" in text else None
        refusal = _refusal(status, code, self._credential_settings)
        if refusal:
            message, advice = refusal
            return ConfigError(
                f"{self.url}: {message}", cause=code, endpoint=self._endpoint_name(), next=advice
            )
        if is_of_obstore or status is None or status >= 500 or status in TEMPORARY_STATUSES:
            return self._answer_error(status, code)
        return None

    def _answer_error(self, status: int | None, code: str) -> PlatformError:
        answer = " ".join(str(part) for part in (status, code) if part)
        return PlatformError(
            f"{self.url}: the store answers {answer}",
            endpoint=self._endpoint_name(),
            next="run again; if it stays, look at the store",
        )

    def _silence_error(self, text: str) -> PlatformError:
        cause = "the request failed"
        if "Timeout" in text or "timed out" in text:
            cause = "no answer in time"
        elif "Connect" in text:
            cause = "no connection"
        return PlatformError(
            f"{self.url}: the store cannot be reached",
            cause=cause,
            endpoint=self._endpoint_name(),
            next="look at the network and the store, or fix AWS_ENDPOINT_URL; then run again",
        )

    def _endpoint_name(self) -> str:
        region = self._options.get("aws_region")
        if region is None:
            return self.url.partition("://")[0]
        return _endpoint(self._options) or f"AWS in {region}"

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Raise the errors of obstore as the port has them."""
        try:
            yield
        except AlreadyExistsError:
            raise
        except FileNotFoundError as error:
            match = S3_ERROR_CODE.search(str(error))
            if match and match[1] == "NoSuchBucket":
                raise self._known_error(error) from None
            raise FileNotFoundError(errno.ENOENT, "no such object", key) from None
        except (BaseError, OSError) as error:
            raise self._known_error(error) from None
        except BaseException as error:
            # A panic in Rust arrives as a class that is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise PlatformError(
                f"{self.url}: the library of the store failed", cause=str(error)[:200]
            ) from None

    def _known_error(self, error: Exception) -> SeriatimError:
        return self.explain_error(error) or self._silence_error(str(error))


def _refusal(status: int | None, code: str, credential_settings: str) -> tuple[str, str] | None:
    """Why a server refuses a request for good, and what to do about it. None: it may yet answer."""
    if code == "NoSuchBucket":
        return "there is no such bucket", "create the bucket, or fix the address or the endpoint"
    if code in WRONG_REGION or status == 301:
        return "the bucket is in another region", "set AWS_REGION to the region of the bucket"
    if code in WRONG_CREDENTIALS or status == 401:
        return "the store does not accept the credentials", f"fix {credential_settings}"
    if status == 403:
        # Without the right to list, S3 answers 403 for an object that is not there.
        return "the credentials are wrong, or do not allow this", PERMISSIONS_ADVICE
    if status == 501:
        return "the server lacks something that is needed", CONDITIONAL_PUTS_ADVICE
    return None


def _bulk_seconds(options: Mapping[str, str]) -> int:
    """How long a large request may take. Tests have a shorter limit for all."""
    seconds = int(options["timeout"].removesuffix("s"))
    return seconds * BULK_REQUEST_SECONDS // REQUEST_SECONDS


def _http_status(text: str) -> int | None:
    match = HTTP_STATUS.search(text)
    return int(match[1]) if match else None


def _cached_object(digest: str) -> tuple[str, bytes]:
    """What the server called an object that is kept on this host, and its content; both are empty if
    it is not there, or damaged.
    """
    try:
        tag, _, content = _open_cache().read(digest).partition(b"\n")
    except (OSError, ConfigError):
        return "", b""
    if xxhash.xxh3_128_hexdigest(content) != digest:
        return "", b""
    # The digest is the content's alone. A damaged tag that can still be sent only misses.
    is_sendable = all(ord("!") <= byte <= ord("~") for byte in tag)
    return (tag.decode(), content) if is_sendable else ("", b"")


def _cache_object(digest: str, tag: str, content: bytes) -> None:
    """Keep an object on this host. If the cache is full, others go, whichever; a disk that does not
    take it only costs time.
    """
    with suppress(OSError, ConfigError):
        cache = _open_cache()
        cache.replace(digest, b"%s\n%s" % (tag.encode(), content))
        kept_bytes = 0
        for key, size_bytes in sorted(cache.keys(""), key=lambda kept: kept[0] != digest):
            kept_bytes += size_bytes
            if kept_bytes > CACHE_BYTES_MAX:
                cache.delete([key])
                # What killed processes left would never be counted.
                cache.delete_unfinished("")


def _open_cache() -> LocalStore:
    return LocalStore(config.cache_folder() / "state")


class _ObjectReader:
    """A file to read, as pyarrow takes it. Its end came with the first request."""

    closed = False

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._key = key
        self._position = 0
        self._size, self._tail = store.read_tail(key)

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        start = self._position
        end = self._size if size < 0 else min(start + size, self._size)
        if start >= end:
            return b""
        self._position = end
        tail_start = self._size - len(self._tail)
        if start >= tail_start:
            return self._tail[start - tail_start : end - tail_start]
        return self._store.read_range(self._key, start, end)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to another place."""
        origin = (0, self._position, self._size)[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        """The place of the next byte."""
        return self._position

    def close(self) -> None:
        """Forget the end of the object."""
        self.closed = True
        self._tail = b""


class _ObjectSink(HashingSink):
    """Gathers an object, and puts it into the store when it is finished."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._content = bytearray()

    def _append(self, view: memoryview) -> None:
        if len(self._content) + len(view) > OBJECT_BYTES_MAX:
            raise ConfigError(
                f"{self._store.uri(self._key)}: an object cannot be larger than 5 GB",
                next="lower slice.messages_max in the stream file, or --messages-max",
            )
        self._content += view

    def _publish(self) -> None:
        try:
            self._store.create(self._key, self._content)
        finally:
            self._content = bytearray()

    def _give_up(self) -> None:
        self._content = bytearray()
