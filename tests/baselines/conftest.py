"""Leaves the tests of most baselines to .ci/run."""

import pathlib

import pytest

# One of every mechanism, as in `contracts/conftest.py`, runs by default.
_BY_DEFAULT = ('fed_avg', 'scaffold', 'ditto', 'ifca', 'fed_proto', 'pfedhn')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Marks them before pytest chooses by marks; slow ones stay slow."""
  for item in items:
    name = item.path.stem.removeprefix('test_')
    if (
        item.path.parent == pathlib.Path(__file__).parent
        and name not in _BY_DEFAULT
        and item.get_closest_marker('slow') is None
    ):
      item.add_marker(pytest.mark.ci)
