"""Flags that more than one program has.

Where one is not given, training takes what suits the data, and evaluation takes
what the run had.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags

from binaries import command_line
from binaries import flag_kinds
from tff_meta import plugins
from tff_meta.training import protocol_names
from tff_meta.training import run_directory

# Fields of a run's configuration whose flags have another name.
_FLAGS = {'protocols': 'protocol'}

DATA_DIR = flag_kinds.define_path(
    'data_dir',
    None,
    'Where data sets are; by default the place TFDS uses, or the working'
    ' directory for data of your own.',
)
PROTOCOL = flag_kinds.define_list(
    'protocol',
    f'What to evaluate: {", ".join(protocol_names.PROTOCOLS)}; none for'
    ' nothing. By default new_groups and those of clients, where algorithm and'
    ' data offer them.',
)
EVAL_GROUPS = flag_kinds.define_whole_number(
    'eval_groups',
    None,
    'Groups to evaluate in; by default training takes 100, and evaluation as'
    ' many as the run.',
    least=1,
)
WAY = flag_kinds.define_whole_number(
    'way',
    None,
    'Classes of a group; by default training takes what suits the data set, and'
    " evaluation the run's.",
    least=2,
)
GROUP_CLIENTS = flag_kinds.define_whole_number(
    'group_clients',
    None,
    'Clients of a group; by default training takes what suits the data set, and'
    " evaluation the run's.",
    least=1,
)
EVAL_SUPPORT_FRACTION = flag_kinds.define_number(
    'eval_support_fraction',
    None,
    "Share of a client's test examples that it adapts on, the rest being tested"
    " on; by default what the algorithm's --hparams say or, where they have no"
    ' such share, none: it adapts on its training examples.',
)
EVAL_SHOTS = flag_kinds.define_whole_number(
    'eval_shots',
    None,
    'Examples of a class that a tested client adapts on: in new groups exactly'
    ' so many, else at most; by default all that it has to adapt on (in new'
    ' groups half of its examples).',
    least=1,
)
RESTRICT_F1_TO_CLIENT_LABELS = flags.DEFINE_bool(
    'restrict_f1_to_client_labels',
    None,
    'Whether to leave classes that a client does not have out of its macro-F1,'
    ' as the code of FedMeta-Per does; by default what the'
    " algorithm's --hparams say or, where they have no such choice, not.",
)
REFERENCES = flags.DEFINE_bool(
    'references',
    None,
    'Whether to test the untrained model, too, and in new groups FedAvg from'
    ' scratch; by default training does, and evaluation does as the run.'
    ' Without, an evaluation takes half, or a third, of the time.',
)
CURVE = flags.DEFINE_bool(
    'curve',
    None,
    "Whether to measure clients' accuracy after every step of adaptation, too.",
)
NVAR = flags.DEFINE_bool(
    'nvar',
    None,
    'Whether to measure how widely classes spread in the embedding of known'
    " clients' test examples, too (normalized variance, as in table 4 of the"
    ' MetaVers paper).',
)
DEVICE = flags.DEFINE_enum(
    'device',
    'auto',
    ['auto', 'cpu', 'gpu'],
    'Where to compute; auto is on all GPUs, or the CPU where there is none.',
)
EXECUTION = flags.DEFINE_enum(
    'execution',
    'in_process',
    ['in_process', 'native', 'ray'],
    "What computes: this process; of training TFF's own worker, too (CPU only,"
    ' slower); or workers of a Ray cluster.',
)
RAY_ADDRESS = flags.DEFINE_string(
    'ray_address',
    'local',
    'With --execution=ray, the cluster: local has workers of this machine that'
    ' end with the program, auto is the cluster that this machine belongs to;'
    ' or HOST:PORT.',
)
WORKERS = flag_kinds.define_whole_number(
    'workers', 2, 'With --execution=ray, how many workers.', least=1
)
WORKER_CPUS = flag_kinds.define_whole_number(
    'worker_cpus',
    1,
    'CPU cores of a worker, which computes as many clients at the same time.',
    least=1,
)
WORKER_GPUS = flag_kinds.define_whole_number(
    'worker_gpus', 0, 'GPUs of a worker, 0 or 1.'
)
WORKER_TIMEOUT_SECONDS = flag_kinds.define_number(
    'worker_timeout_seconds',
    300.0,
    'How long to wait for a worker where none is there.',
)
ALLOW_MIXED_HOSTS = flags.DEFINE_bool(
    'allow_mixed_hosts',
    False,
    'Take workers with other versions, settings or devices, too; results then'
    ' depend on who computes what.',
)
_OF_RAY = (
    RAY_ADDRESS,
    WORKERS,
    WORKER_CPUS,
    WORKER_GPUS,
    WORKER_TIMEOUT_SECONDS,
    ALLOW_MIXED_HOSTS,
)
PLUGINS = flag_kinds.define_list(
    'plugins',
    'Modules that add algorithms, networks, data sets, partitions or tables,'
    ' named as in `import` and looked for in the working directory, on'
    ' PYTHONPATH and among what is installed; by default those of the run.',
)


def import_plugins(*run_dirs: str) -> tuple[str, ...]:
  """Imports the plugins of packages and of --plugins, or else those of runs.

  Args:
    run_dirs: Directories of the runs, which need not exist.

  Returns:
    The names of those that are not of packages.

  Raises:
    ImportError: If a package's cannot be imported.
    RunDirectoryError: If a run's config.json cannot be read.
    ValueError: If another cannot be imported.
  """
  plugins.import_installed()
  _import(PLUGINS.value, '--plugins')
  names = dict.fromkeys(PLUGINS.value)
  if not names:
    for run_dir in run_dirs:
      directory = run_directory.RunDirectory(run_dir)
      recorded = directory.read_plugins()
      _import(recorded, str(directory.config))
      names |= dict.fromkeys(recorded)
  return tuple(names)


def _import(names: Sequence[str], wanted_by: str) -> None:
  """Imports plugins, and says so: most import TensorFlow."""
  for name in names:
    plugins.check_is_there(name, wanted_by)
  if names:
    command_line.announce(f'Importing {", ".join(names)}.')
  plugins.import_named(names, wanted_by)


def values(fields: Iterable[str]) -> dict[str, Any]:
  """Returns what the flags of fields of a run's configuration hold.

  Args:
    fields: Names of fields.

  Returns:
    Field -> value, lists as tuples.
  """
  found = {name: flags.FLAGS[_FLAGS.get(name, name)].value for name in fields}
  return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


def execution_among(*known: str) -> str:
  """Returns --execution, or raises a ValueError if it is none of these."""
  if EXECUTION.value not in known:
    raise ValueError(
        f'Expected --execution={" or ".join(known)} of this program, found'
        f' {EXECUTION.value}.'
    )
  return EXECUTION.value


def ray_options(execution: str) -> dict[str, Any]:
  """Returns the fields of `ray_pool.Options` as the flags have them.

  Args:
    execution: The program's --execution.

  Raises:
    ValueError: If one is given, and it is another one than ray.
  """
  given = [flag.name for flag in _OF_RAY if flag.present]
  if given and execution != 'ray':
    raise ValueError(
        f'Expected --execution=ray with --{given[0]}, found {execution}.'
    )
  return {
      'address': RAY_ADDRESS.value,
      'workers': WORKERS.value,
      'worker_cpus': WORKER_CPUS.value,
      'worker_gpus': WORKER_GPUS.value,
      'worker_timeout_seconds': WORKER_TIMEOUT_SECONDS.value,
      'allow_mixed_hosts': ALLOW_MIXED_HOSTS.value,
  }


def settings_of_clients() -> dict[str, float | bool | None]:
  """Returns the settings that only tests of clients have, None if not given."""
  return {
      flag.name: flag.value
      for flag in (EVAL_SUPPORT_FRACTION, RESTRICT_F1_TO_CLIENT_LABELS)
  }


def group_sizes() -> dict[str, int | None]:
  """Returns the sizes of groups that are asked for, None where none is."""
  return {flag.name: flag.value for flag in (WAY, GROUP_CLIENTS)}
