"""The limit on restarts of a core, and the delay before each."""

from vllm_mp.client.engine.supervisor import RestartLimit


def test_cores_that_served_are_restarted_at_once_up_to_the_limit():
    limit = RestartLimit(3, 10.0)
    assert [limit.delay_after(now, True) for now in (0.0, 1.0, 2.0, 3.0)] == [0.0, 0.0, 0.0, None]


def test_deaths_before_the_window_do_not_count():
    limit = RestartLimit(2, 10.0)
    assert [limit.delay_after(now, True) for now in (0.0, 1.0, 10.0, 11.0, 12.0)] == [0.0, 0.0, 0.0, 0.0, None]


def test_restarts_of_cores_that_never_serve_are_delayed_up_to_a_limit():
    limit = RestartLimit(None, 1.0)
    delays = [limit.delay_after(float(now), False) for now in range(10)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]
    assert limit.delay_after(10.0, True) == 0.0
    assert limit.delay_after(11.0, False) == 0.1


def test_limit_of_zero_allows_no_restart():
    assert RestartLimit(0, 10.0).delay_after(0.0, True) is None


def test_forgiven_deaths_do_not_count():
    limit = RestartLimit(2, 100.0)
    for now in (0.0, 1.0):
        limit.delay_after(now, True)
    limit.forgive([0.0, 1.0, 1.0, 50.0])
    assert [limit.delay_after(now, True) for now in (2.0, 3.0, 4.0)] == [0.0, 0.0, None]
