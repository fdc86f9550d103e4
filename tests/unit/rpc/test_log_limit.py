"""LogLimit: the first occurrence of each key, and then powers of two of that key."""

from __future__ import annotations

import threading

from rpc.log_limit import LogLimit


def test_occurrences_when_they_repeat_then_those_at_powers_of_two_are_logged():
    limit = LogLimit()
    assert [n for n in range(1, 1001) if limit.occurred("often")] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_rare_key_when_another_one_came_a_thousand_times_then_its_first_is_logged():
    limit = LogLimit()
    for _ in range(1000):
        limit.occurred("often")
    assert limit.occurred("rare") == 1
    assert limit.occurred("rare") == 2
    assert limit.occurred("rare") == 0


def test_keys_when_there_are_too_many_then_the_rest_share_a_count():
    limit = LogLimit(most_keys=2)
    assert [limit.occurred(key) for key in ("a", "b", "c", "d", "e", "a")] == [1, 1, 1, 2, 0, 2]


def test_occurrences_when_threads_count_then_none_is_lost():
    limit = LogLimit()
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda: numbers.extend(filter(None, (limit.occurred("k") for _ in range(256)))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [2**n for n in range(11)]
