from vllm_mp.core.start_times import StartTimes


def test_each_part_gets_the_time_since_the_part_before_it():
    now = [5.0]
    times = StartTimes(lambda: now[0])
    for seconds, part in ((2.0, "imports"), (0.5, "weights"), (1.0, "imports")):
        now[0] += seconds
        times.end(part)
    assert str(times) == "imports 3.0 s, weights 0.5 s"
