"""The files of the page at `/`, as a server sends them."""

import httpx
import pytest


@pytest.mark.essential
def test_no_file_of_the_page_may_be_taken_for_another_type_or_load_from_elsewhere(server):
    with httpx.Client(base_url=server.url) as client:
        for path, media_type in (
            ("/", "text/html"),
            ("/static/main.js", "text/javascript"),
            ("/static/style.css", "text/css"),
        ):
            response = client.get(path)
            assert (response.status_code, response.content != b"") == (200, True)
            assert response.headers["content-type"] == f"{media_type}; charset=utf-8"
            assert response.headers["x-content-type-options"] == "nosniff"
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            known = client.get(path, headers={"If-None-Match": response.headers["etag"]})
            assert (known.status_code, known.content) == (304, b"")
        for path in ("/static/%2e%2e/live.py", "/static/absent.js"):
            assert client.get(path).status_code == 404
