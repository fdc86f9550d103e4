"""Which configuration the table of products of 81 to 256 rows names for a number of rows."""

import torch

from kernels import small_gemm_table
from kernels.wide_gemm_table import TABLE, Choice, choice_of, configs_for


def test_table_when_read_then_its_ranges_ascend_and_every_configuration_fits_its_shape() -> None:
    for (gated, n, k), entry in TABLE.items():
        lasts = [last for last, _ in entry]
        assert lasts == sorted(set(lasts))
        assert n % 8 == 0 and k % 64 == 0
        for last, config in entry:
            if config is None:
                continue
            assert config.rows in (64, 128) and config.extra <= config.columns
            assert last <= config.width
            if config.shares > 1:
                assert not gated and -(-n // config.height) * config.shares <= 132
            for part in (config.columns, config.extra):
                each = config.rows * part // (2 if gated else 1)
                assert config.shares > 1 or each <= 2 * config.stash


def test_choice_when_rows_lie_in_a_range_then_is_that_ranges() -> None:
    entry = TABLE[True, 28672, 4096]
    choice = choice_of(entry)
    begin = 1
    for last, config in entry:
        assert choice.get(begin) == config and choice.get(last) == config
        begin = last + 1
    assert choice.get(begin) is None and Choice().get(1) is None


def test_choice_when_kernels_do_not_start_early_then_differs_in_that_alone() -> None:
    for entry in TABLE.values():
        early, late = choice_of(entry), choice_of(entry, dependent=False)
        for last, config in entry:
            assert early.get(last) == config
            found = late.get(last)
            assert (found is None) == (config is None) and (found is None or not found.pdl)


def test_tables_when_both_list_a_shape_then_no_number_of_rows_is_in_both() -> None:
    for shape, entry in TABLE.items():
        few = small_gemm_table.TABLE.get(shape, ())
        most_of_few = max((last for last, config in few if config is not None), default=0)
        least = 1
        for last, config in entry:
            assert config is None or least > most_of_few, (shape, last)
            least = last + 1


def test_configurations_when_the_device_was_not_measured_then_are_none() -> None:
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16)
    assert configs_for(weight).get(160) is None
