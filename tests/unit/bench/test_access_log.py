"""The benchmark of the access log, short."""

from __future__ import annotations

from bench.access_log import BEGUN, main, measure_emit, measure_sigterm


def test_emit_when_measured_then_a_full_queue_drops_nearly_all_and_one_with_room_none() -> None:
    with_room, full = (measure_emit(8, 6400, full=full) for full in (False, True))
    assert (with_room.lines, with_room.dropped) == (6400, 0)
    assert full.dropped >= 6399
    for figures in (with_room, full):
        assert 0 < figures.p50_us <= figures.p99_us
        assert figures.per_s > 0


def test_sigterm_when_a_process_logs_on_many_threads_then_every_line_is_in_the_file_or_counted() -> None:
    counts = measure_sigterm(after_s=0.2)
    assert counts["handed_over"] >= BEGUN
    assert counts["in_file"] > 0
    assert counts["lost"] == 0


def test_page_when_printed_then_it_has_a_row_for_each_number_of_threads(capsys) -> None:
    assert main(["--lines", "6400", "--no-sigterm"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert len(rows) == 9
