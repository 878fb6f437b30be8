"""Names that look like formulas."""

import pytest

from tff_meta import escapes


@pytest.mark.parametrize(
    'value, cell',
    [
        ('=1+1', "'=1+1"),
        ('@SUM(A1)', "'@SUM(A1)"),
        ('-2+3', "'-2+3"),
        ('\tx', "'\tx"),
        ('-1.5', '-1.5'),
        ('+3e2', '+3e2'),
        (-1.5, -1.5),
        (None, None),
        ('a=b', 'a=b'),
        ('', ''),
    ],
)
def test_no_cell_is_a_formula(value, cell):
  assert escapes.csv_cell(value) == cell
