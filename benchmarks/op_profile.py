"""Which TensorFlow operations the time of a round goes to.

  python -m benchmarks.op_profile --workload=frl

Prints the operations' shares of the time that kernels take in one round, after
two that do not count; the profiler itself slows small operations down.
"""

import argparse
import collections
import pathlib
import tempfile

from tff_meta.execution import native

native.prepare_environment()

import tensorflow as tf  # noqa: E402
from tensorflow.tsl.profiler.protobuf import xplane_pb2  # noqa: E402

from benchmarks import workloads  # noqa: E402
from tff_meta.execution import in_process  # noqa: E402


def seconds_by_op(directory: str) -> collections.Counter:
  """Returns the seconds of each kind of operation in a profile.

  Args:
    directory: Where the profiler has written.
  """
  seconds: collections.Counter[str] = collections.Counter()
  for path in pathlib.Path(directory).rglob('*.xplane.pb'):
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    for plane in space.planes:
      for line in plane.lines:
        for event in line.events:
          # Kernels are called "name:type"; others are the runtime's own.
          name = plane.event_metadata[event.metadata_id].name
          kind = name.rsplit(':', 1)[-1].split('#')[0].strip()
          is_call = kind.startswith('__') or 'Call' in kind
          if ':' in name and '::' not in name and not is_call:
            seconds[kind] += event.duration_ps / 1e12
  return seconds


def main() -> None:
  """Profiles a round and prints the largest shares."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  known = [*workloads.FED_AVG, *workloads.SYSTEMS]
  parser.add_argument('--workload', choices=known, required=True)
  name = parser.parse_args().workload
  one = workloads.rounds_of(in_process.InProcessContext(), name)
  one(), one()
  with tempfile.TemporaryDirectory() as directory:
    tf.profiler.experimental.start(directory)
    one()
    tf.profiler.experimental.stop()
    seconds = seconds_by_op(directory)
  total = sum(seconds.values())
  print(f'{name}: {total:.2f} s in kernels, on all threads together')
  for kind, value in seconds.most_common(14):
    print(f'  {kind:34}{100 * value / total:6.1f} %')


if __name__ == '__main__':
  main()
  native.end_process(0)
