"""Bodies that clients in other languages send, and errors that name what they sent."""

import pytest

from vllm_mp.server.http.body import decode_body
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.openai.chat import ChatBody
from vllm_mp.server.openai.completions import CompletionBody
from vllm_mp.server.openai.sampling_fields import sampling_params


def test_numbers_may_be_written_as_floats_or_texts():
    body = decode_body(
        b'{"prompt": "x", "max_tokens": 2.0, "temperature": "0.5", "stream": "true", "n": "1"}', CompletionBody
    )
    assert (body.max_tokens, body.temperature, body.stream, body.n) == (2, 0.5, True, 1)


@pytest.mark.parametrize("value", ["2.5", '"two"', "true", "[2]"])
def test_value_that_is_no_such_number_is_refused_by_name(value):
    with pytest.raises(ApiError, match="max_tokens is wrong") as caught:
        decode_body(f'{{"prompt": "5", "max_tokens": {value}}}'.encode(), CompletionBody)
    assert caught.value.param == "max_tokens"


def test_text_that_looks_like_a_number_stays_a_text():
    assert decode_body(b'{"prompt": "5", "max_tokens": "7", "stop": "5"}', CompletionBody).prompt == "5"


def test_byte_order_mark_before_a_body_is_ignored():
    assert decode_body(b'\xef\xbb\xbf{"prompt": "x"}', CompletionBody).prompt == "x"


@pytest.mark.parametrize("before", [b"", b'"model": "m", '])
def test_byte_that_is_no_utf8_is_found_by_its_offset_in_the_body(before):
    content = b"{" + before + b'"prompt": "ab\xff"}'
    with pytest.raises(ApiError, match=f"invalid start byte at byte {content.index(0xFF)}$"):
        decode_body(content, CompletionBody)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_error_has_the_name_that_the_request_gave(kind, name):
    prompt = '"prompt": "x"' if kind is CompletionBody else '"messages": [{"role": "user", "content": "x"}]'
    body = decode_body(f'{{{prompt}, "{name}": -3}}'.encode(), kind)
    with pytest.raises(ApiError, match=f"^{name} must be .*-3") as caught:
        sampling_params(body, {})
    assert caught.value.param == name
