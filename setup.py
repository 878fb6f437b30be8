"""What pyproject.toml cannot say: that data files are installed in any mode."""

import setuptools


class Distribution(setuptools.Distribution):
  """Answers what an editable installation asks before its data files.

  setuptools 75 asks `has_data` (in `editable_wheel`), but calls it
  `has_data_files`, and leaves them out without this.
  """

  has_data = setuptools.Distribution.has_data_files


setuptools.setup(distclass=Distribution)
