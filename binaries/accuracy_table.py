"""The evaluation in a run's summary as a table to print."""

from collections.abc import Mapping, Sequence
from typing import Any

from tff_meta import spelling
from tff_meta.training import protocols


def format_table(evaluation: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the evaluation of a summary as a table to print."""
  lines = []
  for name, result in evaluation.items():
    count = result.get('num_groups') or result['num_clients']
    unit = 'group' if 'num_groups' in result else 'client'
    whose = spelling.counted(count, unit)
    lines.append(f'{name} ({whose}, accuracy +- 1.96 standard errors, percent)')
    own = (
        protocols.FROM_SCRATCH
        if result['starts_from_scratch']
        else protocols.TRAINED
    )
    rows = {own: result, **result['references']}
    for row, values in rows.items():
      line = f'  {protocols.LABELS[row]:25}' + _percent(
          values['accuracy_mean'], values['accuracy_half_width_95']
      )
      if 'gain' in values:
        gain = _percent(values['gain'], values['gain_half_width_95'])
        line += f'   trained gains {gain}'
      lines.append(line)
    lines.append(_further_line(own, result))
  return '\n'.join(lines)


def format_grid(
    name: str, axes: Sequence[str], rows: Sequence[Mapping[str, str]]
) -> str:
  """Returns a grid as a table to print.

  Args:
    name: Of the protocol.
    axes: Of the grid.
    rows: Column -> cell, see `grids.make_row`.
  """
  unit = 'groups' if 'num_groups' in rows[0] else 'clients'
  lines = [[*axes, 'accuracy', '+-', 'worst decile', unit]]
  for row in rows:
    numbers = [
        f'{100 * float(row[column]):.2f}' if column in row else 'unknown'
        for column in (
            'accuracy_mean',
            'accuracy_half_width_95',
            'accuracy_worst_decile',
        )
    ]
    lines.append([*(row[a] for a in axes), *numbers, row[f'num_{unit}']])
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return '\n'.join(
      [f'{name} (accuracy +- 1.96 standard errors, percent)']
      + [
          '  '.join(
              ['', *(c.rjust(w) for c, w in zip(line, widths, strict=True))]
          )
          for line in lines
      ]
  )


def _further_line(model_name, result) -> str:
  """Returns what else is told of clients or groups."""
  parts = [
      f'micro {100 * result["accuracy_micro"]:.2f}',
      f'deviation {100 * result["accuracy_std"]:.2f}',
      f'worst decile {100 * result["accuracy_worst_decile"]:.2f}',
      f'macro-F1 {100 * result["macro_f1_mean"]:.2f}',
  ]
  if result['share_hurt'] is not None:
    parts += [
        f'before adaptation {100 * result["accuracy_before_mean"]:.2f}',
        f'{100 * result["share_hurt"]:.0f} % of clients hurt by it',
    ]
  if result.get('nll_mean') is not None and result['ece_mean'] is not None:
    parts += [
        f'NLL {result["nll_mean"]:.3f}',
        f'calibration error {100 * result["ece_mean"]:.2f}',
    ]
  if result['curve_end_mean'] is not None:
    parts.append(f'last three steps {100 * result["curve_end_mean"]:.2f}')
  if result.get('nvar') is not None:
    parts.append(f'nVAR {result["nvar"]:.4g}')
  return f'  {protocols.LABELS[model_name]}: {", ".join(parts)}'


def _percent(mean: float, half_width: float | None) -> str:
  width = 'unknown' if half_width is None else f'{100 * half_width:.2f}'
  return f'{100 * mean:6.2f} +- {width}'
