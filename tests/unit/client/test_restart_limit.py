"""How often and how soon a core is started again."""

from vllm_mp.client.engine.restart_limit import RestartLimit


def test_cores_that_served_are_replaced_at_once_up_to_the_limit():
    limit = RestartLimit(3, 10.0)
    assert [limit.delay_after(now, True) for now in (0.0, 1.0, 2.0, 3.0)] == [0.0, 0.0, 0.0, None]


def test_what_lies_before_the_window_does_not_count():
    limit = RestartLimit(2, 10.0)
    assert [limit.delay_after(now, True) for now in (0.0, 1.0, 10.0, 11.0, 12.0)] == [0.0, 0.0, 0.0, 0.0, None]


def test_cores_that_never_serve_are_replaced_later_and_later_but_not_too_late():
    limit = RestartLimit(None, 1.0)
    delays = [limit.delay_after(float(now), False) for now in range(10)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]
    assert limit.delay_after(10.0, True) == 0.0
    assert limit.delay_after(11.0, False) == 0.1


def test_no_restarts_at_all():
    assert RestartLimit(0, 10.0).delay_after(0.0, True) is None
