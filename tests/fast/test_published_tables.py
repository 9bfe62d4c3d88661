"""`infinity plan --tables` has the figures that the papers print, to the last digit, plus or minus
one: printed values are rounded or cut there."""

from __future__ import annotations

import math

from infinity.plan import published
from infinity.plan.published import FIGURE_2A, FIGURE_2B, figure_2b, tables, zero_states

# ZeRO (arXiv:1910.02054), table 1: GB per rank by ranks; stages 1, 2 and 3 of 7.5, 128 and 1000
# billion parameters.
ZERO = {
    1: ("120", "120", "120", "2048", "2048", "2048", "16000", "16000", "16000"),
    4: ("52.5", "41.3", "30", "896", "704", "512", "7000", "5500", "4000"),
    16: ("35.6", "21.6", "7.5", "608", "368", "128", "4750", "2875", "1000"),
    64: ("31.4", "16.6", "1.88", "536", "284", "32", "4187", "2218", "250"),
    256: ("30.4", "15.4", "0.47", "518", "263", "8", "4046", "2054", "62.5"),
    1024: ("30.1", "15.1", "0.12", "513", "257", "2", "4011", "2013", "15.6"),
}
# ZeRO-Infinity (arXiv:2104.07857), figure 2a. Its first row prints 1.95, and equation 4 gives 1.56.
LARGE = (
    ("0.10", "80", "10K", "128", "1.83", "2.03", "0.05", "1.56", "1.63"),
    ("0.50", "100", "20K", "160", "9.16", "3.91", "0.12", "6.25", "2.50"),
    ("1.01", "128", "25K", "256", "18.31", "7.13", "0.20", "9.77", "3.56"),
    ("10.05", "195", "64K", "512", "182.81", "24.38", "0.76", "64.00", "8.00"),
    ("101.47", "315", "160K", "1024", "1845.70", "88.59", "3.08", "400.00", "18.00"),
)
# The same, figure 2b: nodes, GPUs, memory in TB, GB/s of a GPU to host memory and to the drives.
CLUSTER = (
    ("1", "1", "0.032", "1.5", "28", "12.0", "12.0"),
    ("1", "16", "0.5", "1.5", "28", "3.0", "1.6"),
    ("4", "64", "2", "6", "112", "3.0", "1.6"),
    ("16", "256", "8", "24", "448", "3.0", "1.6"),
    ("64", "1024", "32", "96", "1792", "3.0", "1.6"),
    ("96", "1536", "48", "144", "2688", "3.0", "1.6"),
)


def agrees(value: float, printed: str) -> bool:
    """Whether `value` differs by at most one unit of the last digit that is printed."""
    return abs(value - float(printed)) <= 10.0 ** -len(printed.partition(".")[2]) * (1 + 1e-9)


def test_states_of_a_rank() -> None:
    for ranks, row in ZERO.items():
        sizes = [(each, stage) for each in published.ZERO_PARAMETERS for stage in published.STAGES]
        for (parameters, stage), printed in zip(sizes, row, strict=True):
            value = zero_states(parameters, ranks, stage) / 1e9
            assert agrees(value, printed), (ranks, parameters, stage, value)


def test_large_models() -> None:
    shown = next(table for table in tables() if "figure 2a" in table.title).rows
    assert len(shown) == len(LARGE) == len(FIGURE_2A)
    for row, printed in zip(shown, LARGE, strict=True):
        for value, expected in zip(row, printed, strict=True):
            if expected.endswith("K"):
                assert value == expected
            else:
                assert agrees(float(value), expected), (row[0], value, expected)


def test_the_cluster() -> None:
    for (nodes, gpus), printed in zip(FIGURE_2B, CLUSTER, strict=True):
        row = figure_2b(nodes, gpus)
        # 16 GPUs of 32 GB are printed as 0.5 TB, and multiples of that follow.
        gpu = row.gpu if gpus == 1 else gpus / 16 * 0.5e12
        values = (nodes, gpus, gpu / 1e12, row.host / 1e12, row.nvme / 1e12)
        rates = (row.host_rate / 1e9, row.nvme_rate / 1e9)
        assert all(map(agrees, (*values, *rates), printed)), row
        assert math.isclose(row.gpu, gpu, rel_tol=0.03)
