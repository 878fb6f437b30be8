"""Calls programs many times in one process, which imports TFF once."""

from collections.abc import Sequence
import json
import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[1]
_TIMEOUT_SECONDS = 3600  # Shared machines can be slow.
_CALLS = """
import contextlib, importlib, io, json, sys, traceback
from absl import flags
from binaries import command_line

def load(name):
  # The flags of programs have the same names, so those of another one go.
  if f'binaries.{name}' not in sys.modules:
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
      if sys.modules.pop(module if module in programs else None, None):
        for flag in defined:
          delattr(flags.FLAGS, flag.name)
  return importlib.import_module(f'binaries.{name}')

calls = json.load(sys.stdin)
programs = {f'binaries.{name}' for name, _ in calls}
for name, argv in calls:
  program = load(name)
  sys.argv = [name, *argv]
  flags.FLAGS.unparse_flags()
  for flag in flags.FLAGS:
    flags.FLAGS[flag].unparse()
  code, out, err = 'traceback', io.StringIO(), io.StringIO()
  with contextlib.redirect_stderr(err):
    with contextlib.redirect_stdout(out):
      try:
        command_line.run(program.main)
      except SystemExit as end:
        code = end.code
      except BaseException:
        traceback.print_exc()
  print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
command_line.native.end_process(0)
"""


def call_all(
    name: str,
    calls: Sequence[Sequence[str]],
    working_directory: pathlib.Path = _ROOT,
) -> list[tuple[int | str, str, str]]:
  """Calls a program of `binaries`.

  Args:
    name: Of its module.
    calls: The arguments of each call.
    working_directory: As for `call_in_turn`.

  Returns:
    As `call_in_turn`.
  """
  return call_in_turn([(name, *call) for call in calls], working_directory)


def call_in_turn(
    calls: Sequence[Sequence[str]], working_directory: pathlib.Path = _ROOT
) -> list[tuple[int | str, str, str]]:
  """Calls programs of `binaries`.

  Args:
    calls: The name of the module and the arguments of each call.
    working_directory: Of the process; modules are not looked for there, as
      installed commands do not, either.

  Returns:
    Of each call the exit code, `'traceback'` where there was one, stdout and
    stderr.
  """
  done = subprocess.run(
      [sys.executable, '-P', '-c', _CALLS],
      cwd=working_directory,
      env=os.environ | {'PYTHONPATH': str(_ROOT)},
      input=json.dumps([(name, arguments) for name, *arguments in calls]),
      capture_output=True,
      text=True,
      timeout=_TIMEOUT_SECONDS,
  )
  assert done.returncode == 0, done.stderr
  return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
