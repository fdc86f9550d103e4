"""How often something that fails is asked again."""

from __future__ import annotations

from cache_store.tiers.circuit import Circuit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_circuit_when_an_operation_fails_then_is_open_until_a_probe_goes_well() -> None:
    clock = Clock()
    circuit = Circuit(0.5, 30.0, clock)
    assert circuit.closed
    assert circuit.failed()
    assert not circuit.closed and circuit.retry_in_s == 0.5
    clock.now += 0.5
    assert not circuit.closed and circuit.retry_in_s == 0.0
    assert circuit.probed()
    assert circuit.closed
    assert not circuit.probed()


def test_circuit_when_failures_follow_each_other_then_the_pause_doubles_up_to_its_limit() -> None:
    clock = Clock()
    circuit = Circuit(0.5, 5.0, clock)
    pauses = []
    for _ in range(6):
        circuit.failed()
        pauses.append(circuit.retry_in_s)
        clock.now += circuit.retry_in_s
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_circuit_when_only_probes_go_well_then_the_next_failure_pauses_for_longer() -> None:
    clock = Clock()
    circuit = Circuit(0.5, 30.0, clock)
    circuit.failed()
    clock.now += 0.5
    circuit.probed()
    circuit.failed()
    assert circuit.retry_in_s == 1.0
    clock.now += 1.0
    circuit.probed()
    circuit.succeeded()
    circuit.failed()
    assert circuit.retry_in_s == 0.5


def test_circuit_when_several_operations_fail_at_once_then_they_count_as_one() -> None:
    clock = Clock()
    circuit = Circuit(0.5, 30.0, clock)
    assert [circuit.failed() for _ in range(4)] == [True, False, False, False]
    assert circuit.retry_in_s == 0.5
    clock.now += 0.5
    circuit.probed()
    circuit.failed()
    assert circuit.retry_in_s == 1.0
