"""How large exported uses are, and how long they take to answer.

  python -m benchmarks.bundles BUNDLE...

Each is a folder of `binaries.export --tflite`. Every use is loaded once. It
adapts to 20 random examples (a group of 5 clients: to 20 each) and is asked for
50, with the signature `adapt_and_predict`; then 50 are asked with `predict` of
what has been adapted. Every time is the median of 20 calls after the first.
Sizes are of the folder of the SavedModel and of the TensorFlow Lite file.
"""

import pathlib
import statistics
import sys
import time

import numpy as np
import tensorflow as tf

from tff_meta.bundles import serve

_CALLS = 20
_CLIENTS, _SUPPORT, _QUERIES = 5, 20, 50


def _milliseconds(call, arrays) -> float:
  call(**arrays)
  times = []
  for _ in range(_CALLS):
    before = time.perf_counter()
    call(**arrays)
    times.append(time.perf_counter() - before)
  return 1e3 * statistics.median(times)


def _arrays(spec):
  """Returns random arrays as a use takes them."""
  rng = np.random.default_rng(0)
  of_group = 'salts' in spec['inputs']
  found = {}
  for name, of in spec['inputs'].items():
    free = [_CLIENTS, _SUPPORT] if of_group else [_SUPPORT]
    if name == 'query_x':
      free = [_QUERIES]
    shape = [free.pop(0) if size is None else size for size in of['shape']]
    if name == 'support_y':
      values = np.arange(np.prod(shape)).reshape(shape) % spec['num_classes']
    elif name == 'support_mask':
      values = np.ones(shape)
    elif of['dtype'].startswith('float'):
      values = rng.random(shape)
    else:
      values = np.zeros(shape)
    found[name] = values.astype(of['dtype'])
  return found


def _saved_model(folder, use):
  """Returns what gives the functions of a use by name, and their bytes."""
  loaded = tf.saved_model.load(str(folder / use))

  def function(name):
    def call(**arrays):
      tensors = {key: tf.constant(array) for key, array in arrays.items()}
      found = loaded.signatures[name](**tensors)
      return {key: tensor.numpy() for key, tensor in found.items()}

    return call

  files = [path for path in (folder / use).rglob('*') if path.is_file()]
  return function, sum(path.stat().st_size for path in files)


def _lite(folder, use):
  """Returns the same of TensorFlow Lite."""
  path = folder / f'{use}.tflite'
  interpreter = tf.lite.Interpreter(str(path))
  return interpreter.get_signature_runner, path.stat().st_size


def main(folders: list[str]) -> None:
  """Prints the table."""
  print('| Algorithm, use | Form | kB | adapt_and_predict, ms | predict, ms |')
  print('| --- | --- | ---: | ---: | ---: |')
  for folder in map(pathlib.Path, folders):
    manifest = serve.read_manifest(folder)
    for use, spec in manifest['uses'].items():
      arrays = _arrays(spec)
      support = {k: v for k, v in arrays.items() if k != 'query_x'}
      for form, load in ('SavedModel', _saved_model), ('TFLite', _lite):
        function, size = load(folder, use)
        both = _milliseconds(function('adapt_and_predict'), arrays)
        adapted = dict(function('adapt')(**support), query_x=arrays['query_x'])
        asked = _milliseconds(function('predict'), adapted)
        print(
            f'| {manifest["algorithm"]}, `{use}` | {form} | {size / 1e3:.0f} |'
            f' {both:.1f} | {asked:.2f} |',
            flush=True,
        )


if __name__ == '__main__':
  main(sys.argv[1:])
