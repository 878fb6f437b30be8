"""Federated meta-learning and personalization on TensorFlow Federated."""

import importlib
import importlib.util
import sys
from typing import Any

__version__ = '0.2.0'

# Checked here because every other module of the package is imported after this
# one. Neither check imports TFF, which takes seconds.
if sys.version_info[:2] != (3, 11):
  raise ImportError(
      'Expected Python 3.11, found Python %d.%d.%d (%s). Tip: TensorFlow'
      ' Federated 0.87.0 has no wheel for newer ones; `./run python ...` at the'
      ' root of the repository or of the source distribution finds Python 3.11'
      ' and makes an environment of it.'
      % (sys.version_info[:3] + (sys.executable,))
  )
if importlib.util.find_spec('tensorflow_federated') is None:
  raise ImportError(
      'Expected the package tensorflow-federated, found none in the environment'
      f' of {sys.executable}. Tip: pip cannot resolve its requirements; install'
      ' it with `./run` or with `pip install --no-deps -r requirements.txt`, at'
      ' the root of the repository of tff_meta or of its source distribution: a'
      ' wheel has neither file.'
  )


def __getattr__(name: str) -> Any:
  """Imports what a caller begins with when it is asked for."""
  if name in ('fit', 'load', 'export', 'Fitted'):
    return getattr(importlib.import_module('tff_meta.fitting'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
