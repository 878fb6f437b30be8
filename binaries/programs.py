"""The programs as commands of their own, which an installation has.

`tff-meta-train` is `python -m binaries.train`, and so on; a folder `binaries`
in the working directory makes no difference to it.
"""

import runpy


def _run(name: str) -> None:
  runpy.run_module(f'binaries.{name}', run_name='__main__', alter_sys=True)


def train() -> None:
  """Runs `binaries.train`."""
  _run('train')


def evaluate() -> None:
  """Runs `binaries.evaluate`."""
  _run('evaluate')


def compare() -> None:
  """Runs `binaries.compare`."""
  _run('compare')


def analyze() -> None:
  """Runs `binaries.analyze`."""
  _run('analyze')


def export() -> None:
  """Runs `binaries.export`."""
  _run('export')


def worker() -> None:
  """Runs `binaries.worker`."""
  _run('worker')
