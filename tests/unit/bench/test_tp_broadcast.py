"""The measurement of a step's way to the other ranks: real processes, and figures of both ways."""

from __future__ import annotations

import pytest

from bench.tp_broadcast import decoding, main, next_step


def test_steps_when_rows_decode_on_then_their_tables_always_hold_them() -> None:
    batch = decoding(8, 256)
    for step in range(200):
        next_step(batch, step)
        assert all(len(row.block_table) * 64 > row.start >= 256 - 64 for row in batch.rows)
    assert all(len(row.block_table) > 4 for row in batch.rows)


@pytest.mark.extended
def test_measurement_when_it_has_run_then_both_ways_have_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "3", "--batch", "4", "--context", "256", "--steps", "5", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {
        line.split("|")[1].strip(): [int(cell) for cell in line.split("|")[2:-1]] for line in lines if "| Ba" in line
    }
    assert set(rows) == {"Baton's sockets", "Baton's sockets, all rows new"}
    assert any("| gloo broadcast |" in line for line in lines)
    assert all(0 < cell < 10**7 for cells in rows.values() for cell in cells)
