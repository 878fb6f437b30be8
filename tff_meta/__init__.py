"""Federated meta-learning and personalization on TensorFlow Federated."""

import sys

__version__ = '0.1.0'

# Checked here and not in a submodule: no module of this package is compiled or
# imported before this one, and older or newer Pythons have no wheels of TFF.
if sys.version_info[:2] != (3, 11):
  raise ImportError(
      'Expected Python 3.11, the only one that TensorFlow Federated 0.87.0 and'
      ' this project both run on, found Python %d.%d.%d (%s). Tip: the script'
      ' `./run` at the root of the repository finds Python 3.11 and makes an'
      ' environment of it.' % (sys.version_info[:3] + (sys.executable,))
  )
