"""How long rounds take with and without oneDNN's kernels.

  python -m benchmarks.onednn [--workloads=fed_avg_lenet,metavers]

TensorFlow decides on oneDNN when it is imported, so there are two programs for
a workload, which have their rounds in turn.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from tff_meta.execution import native

native.prepare_environment()

from benchmarks import workloads  # noqa: E402
from tff_meta.execution import in_process  # noqa: E402


def _serve(name: str) -> None:
  """Answers every line of the standard input with the seconds of a round."""
  context = in_process.InProcessContext()
  one_round = workloads.rounds_of(context, name)
  one_round(), one_round()
  for _ in sys.stdin:
    started = time.perf_counter()
    one_round()
    print(time.perf_counter() - started, flush=True)


def _program(name: str, switch: str) -> subprocess.Popen:
  """Starts a program that has rounds of a workload."""
  return subprocess.Popen(
      [sys.executable, '-m', 'benchmarks.onednn', f'--serve={name}'],
      env=os.environ | {'TF_ENABLE_ONEDNN_OPTS': switch},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
  )


def _round_seconds(program: subprocess.Popen) -> float:
  assert program.stdin is not None and program.stdout is not None
  program.stdin.write('\n')
  program.stdin.flush()
  return float(program.stdout.readline())


def main() -> None:
  """Prints medians of both, and of the ratios of rounds in turn."""
  known = [*workloads.FED_AVG, *workloads.SYSTEMS]
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workloads', default=','.join(known))
  parser.add_argument('--repeats', type=int, default=9)
  parser.add_argument('--serve', choices=known, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.serve:
    _serve(arguments.serve)
    return
  chosen = arguments.workloads.split(',')
  if not set(chosen) <= set(known):
    parser.error(f'Expected --workloads among {known}, found {chosen}.')
  for name in chosen:
    with _program(name, '1') as on, _program(name, '0') as off:
      pairs = [
          (_round_seconds(on), _round_seconds(off))
          for _ in range(arguments.repeats)
      ]
    medians = [1e3 * statistics.median(p) for p in zip(*pairs, strict=True)]
    ratio = statistics.median(off / on for on, off in pairs)
    print(
        f'{name:20}{medians[0]:10.1f} ms with{medians[1]:10.1f} ms without,'
        f' {ratio:5.2f} x',
        flush=True,
    )


if __name__ == '__main__':
  main()
  native.end_process(0)
