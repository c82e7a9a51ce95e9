"""Where an image of a conversation comes from: a data URL, a host that the operator allows, or an object."""

import asyncio
import base64
import binascii
import contextlib
import functools
import http.client
import ipaddress
import socket
import ssl
import urllib.parse
import weakref
from collections.abc import Collection, Iterable
from typing import Any, Final

from vllm_mp.client.images.media import ImageSourceError
from vllm_mp.client.images.messages import MAX_FILE_BYTES
from vllm_mp.client.threads.background_call import call_in_thread

_FETCH_LIMIT_S: Final = 10.0
"""Longest time for fetching an image."""
_ALL_LIMIT_S: Final = 60.0
"""Longest time for all images of a conversation."""
_MAX_ALL_BYTES: Final = 2**28
"""Bound on the files of all images of a conversation."""
_SOCKET_LIMIT_S: Final = 5.0
_NUM_FETCHES: Final = 4
"""Images of one tenant that are fetched at a time."""
_NUM_ALL_FETCHES: Final = 16
"""The same for all tenants together, who take turns beyond that."""
_CHUNK_BYTES: Final = 2**16
_MAX_URL_CHARACTERS: Final = 2048
_MAX_INLINE_CHARACTERS: Final = 2**18
"""Length of a data URL above which it is decoded beside the event loop."""
_UNKNOWN_TYPE: Final = "application/octet-stream"
_TYPES: Final = ("image/", _UNKNOWN_TYPE, "binary/octet-stream")
"""How the type of a file may begin. The file itself says of which format it is."""


class ImageSources:
    """Turns what a conversation names as an image into what `multi_modal_data` takes."""

    def __init__(self, allowed_domains: Collection[str]) -> None:
        """`allowed_domains` are the hosts, in lower case, from which images are fetched."""
        self._allowed = frozenset(allowed_domains)
        self._places: _Places | None = None

    async def load_all(self, values: Iterable[Any], tenant: int = 0) -> list[Any]:
        """Return what `load` returns for each image of a conversation, which are loaded one after the other.

        Raises ImageSourceError, with the remedy, for the image of which `load` raises ValueError, or at which the files
        exceed `_MAX_ALL_BYTES` or their loading `_ALL_LIMIT_S`.
        """
        loaded: list[Any] = []
        num_bytes, number = 0, 0
        try:
            async with asyncio.timeout(_ALL_LIMIT_S):
                for number, value in enumerate(values):
                    loaded.append(await self.load(value, tenant))
                    num_bytes += len(loaded[-1]) if isinstance(loaded[-1], bytes) else 0
                    if num_bytes > _MAX_ALL_BYTES:
                        raise ValueError(
                            f"the files of the first {number + 1} images have {num_bytes} bytes, the limit for a "
                            f"conversation is {_MAX_ALL_BYTES}; give fewer or smaller images"
                        )
        except TimeoutError:
            reason = f"the images up to this one did not arrive within {_ALL_LIMIT_S:g} s; send them as data URLs"
            raise ImageSourceError(number, reason) from None
        except ValueError as error:
            raise ImageSourceError(number, str(error)) from None
        return loaded

    async def load(self, value: Any, tenant: int = 0) -> Any:
        """Return the bytes that the URL `value` of a tenant names; any other value as it is.

        Raises ValueError, with the remedy, for a URL that is not allowed or not served, or has no image.
        """
        if not isinstance(value, str):
            return value
        if value[:5].lower() == "data:":
            if len(value) <= _MAX_INLINE_CHARACTERS:
                return data_of(value)
            return await call_in_thread(functools.partial(data_of, value))
        url = self._checked_url(value)
        places = self._places
        if places is None or places.loop is not asyncio.get_running_loop():  # only one loop at a time uses an engine
            places = self._places = _Places()
        async with places.of(tenant), places.all:
            return await fetch(url)

    def _checked_url(self, url: str) -> urllib.parse.SplitResult:
        """Return the parts of a URL from which images may be fetched. Raises ValueError for other URLs."""
        if len(url) > _MAX_URL_CHARACTERS:
            raise ValueError(f"the URL has {len(url)} characters, the limit is {_MAX_URL_CHARACTERS}; shorten it")
        try:
            parts = urllib.parse.urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError as error:
            raise ValueError(f"{url!r:.100} is no URL: {error}; correct it") from None
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"{url!r:.100} must be a data URL (data:image/png;base64,...), or an http or https URL")
        if host not in self._allowed:
            raise ValueError(
                f"images are not fetched from {host!r:.100}: send a data URL, or start the engine with this host in "
                "allowed_media_domains"
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError("the URL of an image must not hold a user or a password; leave them out")
        return parts


class _Places:
    """Places for fetches in the running event loop.

    A tenant waits for a place of its own first. So at most `_NUM_FETCHES` of it are in the queue for the common places.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.all = asyncio.Semaphore(_NUM_ALL_FETCHES)
        self._of_tenants: weakref.WeakValueDictionary[int, asyncio.Semaphore] = weakref.WeakValueDictionary()
        """By tenant, as long as an image of it is fetched or waits."""

    def of(self, tenant: int) -> asyncio.Semaphore:
        return self._of_tenants.setdefault(tenant, asyncio.Semaphore(_NUM_FETCHES))


def data_of(url: str) -> bytes:
    """Return the bytes in a data URL. Raises ValueError, with the remedy, unless it holds an image as base64."""
    head, comma, content = url[5:].partition(",")
    kind, *parameters = head.split(";")
    if not comma or "base64" not in [each.strip().lower() for each in parameters]:
        raise ValueError("a data URL must have the form data:image/png;base64,...: encode the image as base64")
    if not (kind.strip().lower() or _UNKNOWN_TYPE).startswith(_TYPES):
        raise ValueError(f"the data URL is of type {kind!r:.100}; it must be an image, such as image/png")
    if len(content) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise ValueError(f"the image has more than {MAX_FILE_BYTES} bytes, the limit; make it smaller")
    try:
        return base64.b64decode(urllib.parse.unquote(content) if "%" in content else content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the data URL holds no valid base64: {error}; encode the image again") from None


async def fetch(url: urllib.parse.SplitResult) -> bytes:
    """Return the body of the answer to `url`, without following redirects.

    The address of its host must be a public one. Raises ValueError, with the cause, for any other answer than an
    image of at most `MAX_FILE_BYTES` bytes within `_FETCH_LIMIT_S`.
    """
    connection = _Connection(url.hostname or "", url.port, is_tls=url.scheme == "https")
    try:
        async with asyncio.timeout(_FETCH_LIMIT_S):
            return await call_in_thread(functools.partial(_fetch, connection, url))
    except TimeoutError:
        raise ValueError(f"the image did not arrive within {_FETCH_LIMIT_S:g} s; send it as a data URL") from None
    finally:
        connection.stop()


def _fetch(connection: "_Connection", url: urllib.parse.SplitResult) -> bytes:
    """Do the work of `fetch` in the calling thread, until `connection` is stopped."""
    path = urllib.parse.quote(url.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = f"?{urllib.parse.quote(url.query, safe='/%:@!$&()*+,;=~-._?')}" if url.query else ""
    try:
        connection.request("GET", path + query, headers={"Accept": "image/*", "User-Agent": "vllm-mp"})
        return _body(connection.getresponse())
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"the image at {url.geturl()!r:.200} cannot be fetched: {str(error) or repr(error):.200}"
        ) from None
    finally:
        connection.close()


def public_address(host: str, port: int) -> str:
    """Return an address of `host`. Raises ValueError if one of its addresses is not public, and OSError if none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        if not (mapped or parsed).is_global or (mapped or parsed).is_multicast:
            raise ValueError(f"images are not fetched from {host}: its address {address} is inside a network")
    return addresses[0]


class _Connection(http.client.HTTPConnection):
    """A connection to an address that is checked, so that no second look-up can give another."""

    def __init__(self, host: str, port: int | None, *, is_tls: bool) -> None:
        super().__init__(host, port or (443 if is_tls else 80), timeout=_SOCKET_LIMIT_S)
        self._is_tls = is_tls
        self._socket: socket.socket | None = None
        """The socket, as long as the answer is read; `sock` is None from the end of its headers on."""
        self._is_stopped = False

    def connect(self) -> None:
        address = public_address(self.host, self.port)
        self._use(socket.create_connection((address, self.port), _SOCKET_LIMIT_S))
        if self._is_tls:
            context = ssl.create_default_context()
            tls = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self._use(tls)
            tls.do_handshake()

    def stop(self) -> None:
        """End what another thread reads or writes, however long its host would keep it."""
        self._is_stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Of SSLSocket, this method would also change what the other thread uses.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _use(self, sock: socket.socket) -> None:
        self.sock = self._socket = sock
        if self._is_stopped:  # `stop` did not see it
            raise ConnectionAbortedError


def _body(response: http.client.HTTPResponse) -> bytes:
    if response.status != http.client.OK:
        remedy = "; redirects are not followed, so name the file itself" if 300 <= response.status < 400 else ""
        raise ValueError(f"the host of the image answered with the status {response.status}{remedy}")
    kind = (response.getheader("Content-Type") or _UNKNOWN_TYPE).lower()
    if not kind.startswith(_TYPES):
        raise ValueError(f"the host sent {kind!r:.100}, which is no image; check the URL")
    body = bytearray()
    while chunk := response.read1(_CHUNK_BYTES):
        body += chunk
        if len(body) > MAX_FILE_BYTES:
            raise ValueError(f"the image has more than {MAX_FILE_BYTES} bytes, the limit; name a smaller one")
    return bytes(body)
