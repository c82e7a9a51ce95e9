"""Generated schemas through a server: each is served or refused, and none ends the core."""

import pytest

from vllm_mp.testing.fuzzing import attack_server, server_under_attack

pytestmark = pytest.mark.usefixtures("forked_programs")


def test_no_generated_schema_ends_the_core_of_a_server(small_model):
    flags = ("--dtype", "float32", "--num-threads", "1", "--kv-cache-memory-bytes", str(2**26))
    with server_under_attack(str(small_model), *flags) as (url, pid):
        report = attack_server(url, pid, 60, 0, lambda line: None)
    assert report.breaches == []
    assert report.answers["200"] > 20
    assert report.answers["400 invalid_constraint"] > 5
    assert report.calm_answers == 2
