"""Which URLs images may come from, and how long a host may take."""

import asyncio
import base64
import socket
import threading
import time

import pytest
from support.image_models import file_of, picture

from vllm_mp.client.images import sources
from vllm_mp.client.images.media import ImageSourceError
from vllm_mp.client.images.sources import ImageSources

FILE = file_of(picture(2, 2))
URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


def load(value, *allowed):
    return asyncio.run(ImageSources(allowed).load(value))


def test_data_url_is_decoded():
    assert load(URL) == FILE
    for kind in ("application/octet-stream", "binary/octet-stream", ""):
        assert load(URL.replace("image/png", kind)) == FILE
    assert load(URL.replace("+", "%2B").replace("data:image/png", "DATA:image/jpeg;x=y")) == FILE


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (URL.replace("image/png", "text/html"), "of type 'text/html'; it must be an image"),
        ("data:image/png,abc", "must have the form data:image/png;base64"),
        ("data:image/png;base64,a!", "no valid base64"),
        ("file:///etc/passwd", "must be a data URL"),
        ("https://example.org/a.png", "not fetched from 'example.org': send a data URL"),
        ("https://images.example.com.evil.org/", "not fetched from 'images.example.com.evil.org'"),
        ("https://me:secret@images.example.com/", "user or a password"),
        ("https://images.example.com:x/", "is no URL"),
        ("https://images.example.com/" + "a" * 3000, "characters, the limit is 2048"),
    ],
)
def test_url_that_is_not_allowed_is_refused_with_the_remedy(url, said):
    with pytest.raises(ValueError, match=said):
        load(url, "images.example.com")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:192.168.0.1", "fe80::1"]
)
def test_host_with_an_address_inside_the_network_is_not_asked(monkeypatch, address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(family, socket.SOCK_STREAM, 6, "", (address, 443))])
    monkeypatch.setattr(socket, "create_connection", pytest.fail)
    with pytest.raises(ValueError, match="is inside a network"):
        load("https://images.example.com/a.png", "images.example.com")


class Host:
    """A host that answers one request with fixed bytes."""

    def __init__(self, monkeypatch, answer):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.answer = answer
        port = self.server.getsockname()[1]
        monkeypatch.setattr(sources, "public_address", lambda host, port: "127.0.0.1")
        self.url = f"http://images.example.com:{port}/a b.png?x=1"

    async def load(self):
        loop = asyncio.get_running_loop()
        served = loop.run_in_executor(None, self._serve)
        try:
            return await ImageSources(["images.example.com"]).load(self.url)
        finally:
            self.request = await served

    def _serve(self):
        with self.server, self.server.accept()[0] as peer:
            request = peer.recv(4096)
            peer.sendall(self.answer)
        return request


def answer(status, kind, body=FILE, more=""):
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + body


@pytest.mark.parametrize("kind", ["image/png", "binary/octet-stream"])
def test_image_is_fetched_from_an_allowed_host(monkeypatch, kind):
    host = Host(monkeypatch, answer("200 OK", kind))
    assert asyncio.run(host.load()) == FILE
    assert host.request.startswith(b"GET /a%20b.png?x=1 HTTP/1.1\r\nHost: images.example.com:")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (answer("302 Found", "image/png", more="Location: http://127.0.0.1/\r\n"), "redirects are not followed"),
        (answer("404 Not Found", "image/png"), "the status 404"),
        (answer("200 OK", "text/html"), "'text/html', which is no image"),
        (b"nonsense\r\n\r\n", "cannot be fetched"),
    ],
)
def test_other_answers_of_a_host_are_refused(monkeypatch, sent, said):
    with pytest.raises(ValueError, match=said):
        asyncio.run(Host(monkeypatch, sent).load())


def test_file_that_is_too_large_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        asyncio.run(Host(monkeypatch, answer("200 OK", "image/png")).load())


class SlowHost:
    """A host that begins an answer and goes on with a byte at a time, for a few seconds or until it is cut off."""

    def __init__(self, monkeypatch, begin):
        monkeypatch.setattr(sources, "public_address", lambda host, port: "127.0.0.1")
        self.server = socket.create_server(("127.0.0.1", 0))
        self.begin = begin
        self.port = self.server.getsockname()[1]
        self.was_cut_off = False
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        with self.server, self.server.accept()[0] as peer:
            peer.recv(4096)
            try:
                peer.sendall(self.begin)
                for _ in range(300):
                    peer.sendall(b"a")
                    time.sleep(0.01)
            except OSError:
                self.was_cut_off = True


@pytest.mark.parametrize(
    ("scheme", "begin"),
    [
        ("http", b"HTTP/1.1 200 OK\r\nX: "),
        ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;"),
        ("http", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"),
        ("https", b"\x16\x03\x03\x3f\xff"),  # the head of a record of TLS
    ],
)
def test_host_that_sends_slowly_is_cut_off_at_the_limit(monkeypatch, scheme, begin):
    monkeypatch.setattr(sources, "_FETCH_LIMIT_S", 0.2)
    host = SlowHost(monkeypatch, begin)
    with pytest.raises(ValueError, match=r"did not arrive within 0\.2 s; send it as a data URL"):
        load(f"{scheme}://images.example.com:{host.port}/a.png", "images.example.com")
    host.thread.join()
    assert host.was_cut_off


def test_files_of_a_conversation_are_bounded_together(monkeypatch):
    monkeypatch.setattr(sources, "_MAX_ALL_BYTES", 2 * len(FILE))
    image = object()
    assert asyncio.run(ImageSources([]).load_all([URL, image, URL])) == [FILE, image, FILE]
    with pytest.raises(ImageSourceError, match=f"first 4 images have {3 * len(FILE)} bytes, the limit") as caught:
        asyncio.run(ImageSources([]).load_all([URL, image, URL, URL, URL]))
    assert caught.value.number == 3


def test_images_of_a_conversation_must_arrive_within_one_limit(monkeypatch):
    async def fetch(url):
        await asyncio.Event().wait()

    monkeypatch.setattr(sources, "fetch", fetch)
    monkeypatch.setattr(sources, "_ALL_LIMIT_S", 0.05)
    with pytest.raises(ImageSourceError, match=r"did not arrive within 0\.05 s; send them as data URLs") as caught:
        asyncio.run(ImageSources(["images.example.com"]).load_all([URL, "https://images.example.com/a.png", URL]))
    assert caught.value.number == 1


def test_look_up_that_hangs_keeps_no_place_of_other_images(monkeypatch):
    monkeypatch.setattr(sources, "_FETCH_LIMIT_S", 0.1)
    monkeypatch.setattr(sources, "_NUM_FETCHES", 1)
    is_over = threading.Event()

    def look_up(host, port):
        is_over.wait(5)
        raise OSError("unknown host")

    monkeypatch.setattr(sources, "public_address", look_up)

    async def load_both():
        images = ImageSources(["images.example.com"])
        urls = [f"http://images.example.com/{name}.png" for name in "ab"]
        return await asyncio.gather(*map(images.load, urls), return_exceptions=True)

    try:
        for error in asyncio.run(load_both()):
            assert "did not arrive within 0.1 s" in str(error)
    finally:
        is_over.set()


def test_slow_hosts_of_one_tenant_keep_no_place_from_another(monkeypatch):
    is_over, begun = asyncio.Event(), []

    async def fetch(url):
        begun.append(url.path)
        if url.path == "/slow.png":
            await is_over.wait()
        return FILE

    monkeypatch.setattr(sources, "fetch", fetch)

    async def load():
        images, host = ImageSources(["images.example.com"]), "https://images.example.com/"
        slow = [asyncio.create_task(images.load(f"{host}slow.png", tenant=1)) for _ in range(40)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(images.load(f"{host}quick.png", tenant=2), 10) == FILE
        assert begun.count("/slow.png") == sources._NUM_FETCHES
        is_over.set()
        return await asyncio.gather(*slow)

    assert asyncio.run(load()) == 40 * [FILE]
