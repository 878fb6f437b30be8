"""What all tests share: an execution context, and where real data lie."""

import io
import os
import pathlib
import sys

import psutil
import pytest

from tff_meta.execution import native

# Read when TensorFlow and gRPC are imported, so before any test module is.
native.prepare_environment()


@pytest.fixture(scope='session', autouse=True)
def execution_context():
  """Chooses this process, unless no collected test imports TFF."""
  if 'tensorflow_federated' in sys.modules:
    # Here, because it imports TFF, which not all tests need.
    from tff_meta.execution import in_process

    in_process.set_in_process_context()
  yield
  # Workers that TFF itself has started outlive Python and keep stdout open.
  for child in psutil.Process().children(recursive=True):
    if child.name() == 'worker_binary':
      child.kill()


def pytest_sessionfinish(session, exitstatus):
  """Keeps the exit code for `pytest_unconfigure`."""
  session.config.final_exit_code = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
  """Ends pytest where TFF was used, see `native.end_process`."""
  if 'tensorflow_federated' in sys.modules:
    native.end_process(getattr(config, 'final_exit_code', 1))


@pytest.fixture
def terminal() -> io.StringIO:
  """Returns a stream that says that it is a terminal, and keeps the text."""

  class Terminal(io.StringIO):

    def isatty(self):
      return True

  return Terminal()


@pytest.fixture(scope='session')
def real_data_dir() -> pathlib.Path:
  """Returns the folder of the real data sets; without it, skips the test."""
  folder = os.environ.get('TFF_META_DATA_DIR')
  if not folder:
    pytest.skip('needs real data: set TFF_META_DATA_DIR to their folder')
  return pathlib.Path(folder)
