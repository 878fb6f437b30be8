"""Says which of several runs `binaries.train` would refuse, before one begins.

`binaries.compare` starts it, once for all runs: in one process the flags of the
two programs, many of which have the same names, would be in each other's way. A
JSON list of the flags of each run comes on stdin, and the number of the one
that is looked at goes to stdout. At a run that is refused it ends as the run
would, with the same line on stderr. No data set is read, but for what runs look
at of data of one's own, and nothing is written.
"""

import contextlib
import json
import sys

from absl import flags

from binaries import command_line
from binaries import train


def main() -> int:
  """Runs the program and returns its exit code."""
  numbers = sys.stdout
  with contextlib.redirect_stdout(sys.stderr):  # What plugins print.
    for number, arguments in enumerate(json.load(sys.stdin)):
      print(number, file=numbers, flush=True)
      for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
      command_line.parse(['binaries.train', *arguments])
      with command_line.reported_errors():
        train.configuration()
  return 0


if __name__ == '__main__':
  command_line.run_and_end(main)
