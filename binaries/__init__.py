"""Command-line programs: `python -m binaries.train` and its siblings."""

import sys

try:
  import tff_meta  # noqa: F401  Checks Python and that TFF is installed.
except ImportError as error:
  sys.exit(f'error: {error}')
