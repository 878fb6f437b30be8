"""Writes what clients of kept runs are sent, and send, in a round.

  ./run python docs/traffic_of_kept_runs.py

Runs of earlier versions do not say it. So the process that a kept config.json
stands for is built, as the library builds it now, and read off its types; no
data are needed. `traffic.json` beside a kept table has the numbers. A row whose
configuration is none of this version any more is left out.
"""

from collections.abc import Mapping
import pathlib
import runpy
from typing import Any

from binaries import experiments
from tff_meta import method as method_lib
from tff_meta import models
from tff_meta import registry
from tff_meta import traffic
from tff_meta.comparison import progress
from tff_meta.comparison import results
from tff_meta.training import atomic_files
from tff_meta.training import run_config

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def of_run(record: Mapping[str, Any]) -> dict[str, int | None]:
  """Returns what travels in a round of a run.

  Args:
    record: Its config.json.

  Returns:
    Bytes `down` and `up` of one client, and the number of `clients`.

  Raises:
    ValueError: If it is no configuration of this version of the library.
  """
  config = run_config.from_json(record['config'])
  data = record['data']
  model = models.build(config.model, tuple(data['input_shape']), None)
  method = registry.get(config.algorithm).method(
      model, config.hparams, data['num_classes']
  )
  process = method_lib.build_process(
      method,
      model,
      seed=config.seed,
      aggregation=config.training.aggregator(),
  )
  sent = traffic.of_process(process)
  return {**sent._asdict(), 'clients': config.training.clients_per_round}


def main() -> None:
  """Writes the files of tables whose runs have curves and no bytes."""
  kept_runs = runpy.run_path(str(_ROOT / 'docs/generate.py'))['_runs']
  for claim in sorted(_ROOT.glob('results/*/comparison.json')):
    table = experiments.get(claim.parent.name)
    found: dict[str, dict[str, Any]] = {}
    for setting, row, runs in kept_runs(claim.parent.name):
      if not all((run / 'metrics.csv').exists() for run in runs):
        continue  # Not all files of a run are kept.
      curves = progress.of_runs({row: runs}, table.setting(setting))
      if curves is None:
        continue
      if None not in next(iter(curves.rows[row][0].sent.values())):
        continue  # They say it themselves.
      try:
        of_row = of_run(results.read_json(runs[0] / 'config.json'))
      except ValueError as error:
        print(f'{claim.parent.name}, {setting}, {row}: {error}')
        continue
      found.setdefault(setting, {})[row] = of_row
      print(f'{claim.parent.name}, {setting}, {row}: {of_row}', flush=True)
    if found:
      atomic_files.write_json(claim.with_name(progress.TRAFFIC_FILE), found)


if __name__ == '__main__':
  main()
