"""What is wrong with the environment when TensorFlow Federated fails in it."""

from collections.abc import Callable
import gc
import importlib.metadata
import pathlib
import re
import subprocess
import types

from absl import app

import tff_meta

_DISTRIBUTION = 'tff-meta'
_PINNED = 'pinned'  # The extra that has the pins of requirements.txt.
# What results depend on, to the last bit.
_PACKAGES = 'tensorflow', 'tensorflow-federated', 'numpy'
_PIN = re.compile(r'([\w.-]+)==([\w.]+)')
_EXTRA = re.compile(r'extra *== *["\']([\w-]+)')


def import_tff() -> types.ModuleType:
  """Imports TensorFlow Federated, or says why it cannot be imported.

  TFF imports packages that change under it (jax, protobuf, numpy), each of
  which fails in its own way when its version is not the pinned one. Its modules
  make hundreds of thousands of objects that stay: Python's garbage collector
  does not look through them meanwhile, which would take most of a second.

  Within `absl.app.run` TensorFlow would look for devices half-way through its
  import, before it is eager: Keras models of functions could not be built then,
  and `tf.init_scope` would lead into a graph. So that waits for the import.

  Returns:
    The module `tensorflow_federated`.

  Raises:
    ImportError: If the import fails; names the packages of other versions than
      requirements.txt pins.
  """
  collecting = gc.isenabled()
  gc.disable()
  waiting: list[Callable[[], None]] = []
  call_after_init, app.call_after_init = app.call_after_init, waiting.append
  try:
    import tensorflow_federated
  except Exception as error:
    differing = ', '.join(differing_pins()) or 'none'
    raise ImportError(
        'Expected to import tensorflow_federated, found'
        f' {type(error).__name__}: {error}. Packages that differ from the'
        f' pinned ones: {differing}. Tip: run `pip install --no-deps -r'
        ' requirements.txt` at the root of the repository or of the source'
        ' distribution: a wheel does not have that file.'
    ) from error
  finally:
    app.call_after_init = call_after_init
    if collecting:
      gc.enable()
  for callback in waiting:
    call_after_init(callback)
  return tensorflow_federated


def commit() -> str | None:
  """Returns the commit of this library, `-dirty` if changed, None without."""
  root = pathlib.Path(__file__).resolve().parents[1]
  if not (root / '.git').exists():
    return None
  command = ['git', '-C', str(root), 'describe', '--always', '--dirty']
  try:
    done = subprocess.run(
        [*command, '--abbrev=40', '--exclude=*'],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()


def versions() -> dict[str, str]:
  """Returns the code that results depend on, to the last bit."""
  packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {
      'tff_meta': tff_meta.__version__,
      'commit': str(commit()),
      **packages,
  }


def differing_pins(*extras: str) -> list[str]:
  """Lists the installed packages whose version is not the pinned one.

  Args:
    *extras: Of which extras of this distribution; without any, of
      requirements.txt, which is all that it needs and `pinned`.

  Returns:
    One line for each of the packages of requirements.txt, such as
    'jax 0.4.13 (pinned: 0.4.30)' or 'jax missing (pinned: 0.4.30)', in the
    order of that file. Empty where tff_meta itself is not installed, because
    its metadata hold the pins.
  """
  try:
    requirements = importlib.metadata.requires(_DISTRIBUTION) or []
  except importlib.metadata.PackageNotFoundError:
    return []
  wanted = set(extras) or {'', _PINNED}
  pins = dict(
      _PIN.findall(line)[0]
      for line in requirements
      if ''.join(_EXTRA.findall(line)) in wanted
  )
  found = {name: _installed_version(name) for name in pins}
  return [
      f'{name} {found[name]} (pinned: {version})'
      for name, version in pins.items()
      if found[name] != version
  ]


def _installed_version(name: str) -> str:
  """Returns the version of an installed package, or 'missing'."""
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return 'missing'
