"""How the programs read flags and report errors: a line, no traceback."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import gc
import io
import logging as standard_logging
import operator
import re
import signal
import sys
import threading
from typing import Any, TypeGuard

from absl import app
from absl import flags
from absl import logging

from binaries import flag_files
from tff_meta import progress
from tff_meta.execution import native

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


def report(line: str) -> None:
  """Prints a line on stderr, which results on stdout are kept apart from."""
  progress.write(line)


def announce(line: str) -> None:
  """Says what is going to happen while TensorFlow is loaded, for seconds.

  Says nothing where it is loaded already: then it happens at once.

  Args:
    line: A sentence.
  """
  if 'tensorflow' not in sys.modules:
    report(f'{line} Loading TensorFlow takes some seconds.')


def fail(problem: object, exit_code: int) -> None:
  """Prints what is wrong as one line on stderr and ends the program."""
  report(f'Error: {" ".join(str(problem).split())}')
  sys.exit(exit_code)


_interrupted = threading.Event()


def _interrupt(*_) -> None:
  """Ends the program at Ctrl-C, as Python's own handler, which tells nobody."""
  _interrupted.set()
  raise KeyboardInterrupt


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
  """Turns errors of input and environment into a line and an exit code.

  Impossible input ends with code 2; what `reported_failures` knows with code 1.
  What fails after a Ctrl-C is taken for a consequence, as that of a module that
  was being imported, and ends as the Ctrl-C would have.
  """
  try:
    with reported_failures():
      yield
  except (ValueError, TypeError) as error:
    fail(error, USAGE_ERROR)


@contextlib.contextmanager
def reported_failures(place: object = None) -> Iterator[None]:
  """Turns errors of the environment into a line and exit code 1.

  That is an environment that does not play along: files, missing data sets, a
  broken installation, too little memory, an operation of TensorFlow that fails.

  Args:
    place: Where files are written, for errors that name none, as that of a full
      disk does not.
  """
  try:
    yield
  except Exception as error:
    if _interrupted.is_set():
      raise KeyboardInterrupt from error
    if _is_a(error, 'tensorflow', 'errors.OpError'):
      fail(_operation(error, error.message), FAILURE)
    if _is_a(error, 'grpc', 'RpcError'):  # Of TFF's worker.
      fail(_operation(error, error.details()), FAILURE)
    if isinstance(error, MemoryError):
      fail(f'Expected more memory, found {str(error) or "none left"}', FAILURE)
    if isinstance(error, ImportError | OSError):
      is_nameless = (
          isinstance(error, OSError) and error.errno and error.filename is None
      )
      if is_nameless and place is not None:
        fail(f'{error}, in {place}', FAILURE)
      fail(error, FAILURE)
    raise


def _is_a(error: Exception, module: str, kind: str) -> TypeGuard[Any]:
  """Returns whether an error is of a module's kind, without importing it."""
  imported = sys.modules.get(module)
  return imported is not None and isinstance(
      error, operator.attrgetter(kind)(imported)
  )


def _operation(error: Exception, message: str) -> str:
  """Returns what an operation of TensorFlow said, and its name in a graph.

  In a graph its message is a line among those of the places in the code, that
  before the first `[[{{node NAME}}]]`.
  """
  before, _, after = message.partition('[[{{node ')
  name = f' in {after.partition("}}")[0]}' if after else ''
  said = before.strip().splitlines()[-1] if before.strip() else ''
  said = re.sub(r'{{[^}]*}} ?|\[Op:[^]]*]', '', said).strip()
  kind = type(error).__name__.strip('_')
  return f'Expected TensorFlow to compute, found {kind}{name}: {said}'


def set_execution_context(
    execution: str,
    device: str,
    mixed_precision: bool = False,
    batched_clients: int = 1,
    shards: int = 1,
    ray_options: Mapping[str, Any] | None = None,
) -> None:
  """Chooses what runs TFF computations, and where TensorFlow computes.

  Args:
    execution: `'in_process'`, `'native'` or `'ray'`.
    device: `'auto'`, `'cpu'` or `'gpu'`.
    mixed_precision: Whether TensorFlow may use float16 on GPUs.
    batched_clients: Clients of a device that are computed together.
    shards: To how many shards the clients of a round are dealt.
    ray_options: Fields of `ray_pool.Options`; of `'ray'` alone.

  Raises:
    ConnectionError: If there is no Ray cluster at the address.
    ImportError: If Ray is not installed.
    ValueError: If the choices do not go together, or there is no GPU where one
      is asked for.
  """
  if execution == 'native' and (device == 'gpu' or mixed_precision):
    raise ValueError(
        'Expected --execution=in_process with --device=gpu or'
        " --mixed_precision, found native: TFF's worker knows no GPU."
    )
  # Here, because it imports TensorFlow.
  from tff_meta.execution import in_process

  # The collector need not look again for garbage among TensorFlow's and TFF's
  # modules, which stay; in programs of others that is theirs to decide.
  if not gc.get_freeze_count():
    gc.freeze()
  if execution == 'ray' and device == 'auto':
    device = 'cpu'  # GPUs are the workers'.
  devices = in_process.use_device(device, mixed_precision)
  if execution == 'native':
    native.set_native_context()
  elif execution == 'ray':
    _set_ray_context(devices, batched_clients, shards, ray_options or {})
  else:
    in_process.set_in_process_context(devices, batched_clients, shards)


def _set_ray_context(devices, batched_clients, shards, options) -> None:
  """Starts the workers, which end before the process does."""
  from tff_meta.execution import ray_pool

  pool = ray_pool.set_ray_context(
      ray_pool.Options(**options),
      shards,
      devices=devices,
      batched_clients=batched_clients,
      report=report,
  )
  native.call_before_end(pool.close)


def parse(argv: Sequence[str]) -> list[str]:
  """Parses flags; what is not a flag is an error."""
  program, *arguments = argv
  try:
    rest = flags.FLAGS([program, *flag_files.expand(arguments)])
  except (OSError, ValueError) as error:  # Of a flag file.
    fail(error, USAGE_ERROR)
  except SystemExit:  # Of --help and the like, which end with absl's 1.
    sys.exit(0)
  except flags.Error as error:
    problem = str(error).removeprefix('ERROR:: ')
    fail(f'{problem}. Tip: --helpshort lists the flags', USAGE_ERROR)
  if len(rest) > 1:
    fail(f'Expected only flags, found {" ".join(rest[1:])!r}', USAGE_ERROR)
  return rest


def _keep_interrupt(unraisable) -> None:
  """Sends a Ctrl-C again where Python would ignore it, as `unraisablehook`.

  Python raises nothing out of callbacks of the garbage collector (jax has one
  that TFF brings along) and out of destructors.
  """
  if issubclass(unraisable.exc_type, KeyboardInterrupt):
    # Not from here, which is still inside: a moment later, in another thread.
    threading.Timer(
        0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    ).start()
  else:
    sys.__unraisablehook__(unraisable)


def run(main: Callable[[], int]) -> None:
  """Parses the flags and runs a program, which returns its exit code.

  TensorFlow may be imported by the program, not before.
  """

  def prepared_main(_) -> int:
    with reported_errors():
      native.prepare_environment()
    return main()

  sys.unraisablehook = _keep_interrupt
  for stream in (sys.stdout, sys.stderr):
    # What an output's encoding lacks is written as \\u2013, not an error. One
    # that is closed is None, and one that a caller put there has no encoding.
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors='backslashreplace')
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)
  logging.set_verbosity(logging.WARNING)  # TFDS tells what it opens.
  # TFF's secure sums make checks in their graphs that nothing depends on.
  standard_logging.getLogger('tensorflow').addFilter(
      lambda record: record.filename != 'tf_should_use.py'
  )
  try:
    app.run(prepared_main, flags_parser=parse)
  except KeyboardInterrupt:
    report('Interrupted.')
    sys.exit(INTERRUPTED)


def run_and_end(main: Callable[[], int]) -> None:
  """Runs a program and ends the process, see `native.end_process`."""
  try:
    run(main)
  except SystemExit as end:  # How `run` always ends.
    if end.code is not None and not isinstance(end.code, int):
      report(str(end.code))
      native.end_process(FAILURE)
    native.end_process(end.code or 0)
