"""Keeps `python -m binaries.train` working beside another `binaries`.

Python looks at the working directory first, so that a package of that name in
it hides ours, where this library is installed. The finder below comes after all
others: it is asked for `binaries.NAME` only if the package that was found has
no such module, and finds ours. It hides nothing, and imports nothing until it
is asked. tff_meta_binaries.pth imports this module when Python starts.
"""

import os
import sys

_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'binaries')


class Finder:
  """Finds the modules of our package `binaries` alone."""

  @staticmethod
  def find_spec(name, path=None, target=None):
    """Returns where a module is, see `importlib.abc.MetaPathFinder`."""
    del path, target
    if name.rpartition('.')[0] != 'binaries':
      return None
    from importlib import machinery

    return machinery.PathFinder.find_spec(name, [_OURS])


sys.meta_path.append(Finder)
