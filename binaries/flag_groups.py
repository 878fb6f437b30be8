"""The flags of the programs, by what they are about."""

from absl import flags

ALGORITHM = flags.DEFINE_string(
    'algorithm', None, 'What to train; --list shows all.'
)
PRESET = flags.DEFINE_enum(
    'preset',
    'paper',
    ['paper', 'release'],
    'Hyperparameters as the paper prints them, or as the released code has'
    ' them.',
)
HPARAMS = flags.DEFINE_string(
    'hparams',
    '',
    'Changes to the preset, name=value,... ; an unknown name lists all.',
)

DATASET = flags.DEFINE_string(
    'dataset', None, 'What to train on; --list shows all.'
)
DATASET_OPTIONS = flags.DEFINE_string(
    'dataset_options',
    '',
    "Options of the data set's loader, name=value,... , e.g. scaling=raw.",
)
DATA_DIR = flags.DEFINE_string(
    'data_dir', None, 'Where data sets are; by default the place TFDS uses.'
)
DOWNLOAD = flags.DEFINE_bool(
    'download', False, 'Fetch the data set if it is not there.'
)
PARTITION = flags.DEFINE_string(
    'partition',
    None,
    "How examples go to clients; by default the algorithm's way. few_round"
    ' (needed for groups with new classes) or a partitioner; a wrong name'
    ' lists all.',
)
PARTITION_OPTIONS = flags.DEFINE_string(
    'partition_options',
    '',
    'Options of the partition, name=value,... , e.g. alpha=0.3.',
)
TEST_FRACTION = flags.DEFINE_float(
    'test_fraction',
    None,
    "Share of each client's examples to test on, 0..1; by default the published"
    ' test part is dealt to the clients.',
)
NUM_CLIENTS = flags.DEFINE_integer(
    'num_clients', None, 'Training clients; by default what suits the data.'
)
MODEL = flags.DEFINE_string(
    'model', None, 'Network; by default what suits the data.'
)

ROUNDS = flags.DEFINE_integer(
    'rounds',
    200,
    'Communication rounds of the whole run (an FRL episode with R = 3 takes 4).'
    ' Raise it to extend a finished run.',
)
CLIENTS_PER_ROUND = flags.DEFINE_integer(
    'clients_per_round',
    None,
    'Clients of a round; by default what suits the data.',
)
SEED = flags.DEFINE_integer(
    'seed', 0, 'Of everything random in the run; 0 to 2**31 - 1.'
)
EXECUTION = flags.DEFINE_enum(
    'execution', 'native', ['native'], 'Where TFF computations run.'
)
CHECKPOINT_EVERY = flags.DEFINE_integer(
    'checkpoint_every', 20, 'Rounds from one checkpoint to the next.'
)

PROTOCOL = flags.DEFINE_list(
    'protocol',
    [],
    'What to evaluate: new_groups, new_groups_iid, new_groups_mixed,'
    ' known_clients; none for nothing. By default new_groups and known_clients'
    ' where the algorithm and the data offer them.',
)
EVAL_EVERY = flags.DEFINE_integer(
    'eval_every',
    0,
    'Rounds from one evaluation on the way to the next, 0 for none: accuracy in'
    ' groups of meta-validation classes, or of known clients.',
)
VALIDATION_GROUPS = flags.DEFINE_integer(
    'validation_groups', 20, 'Groups of an evaluation on the way.'
)
EVAL_GROUPS = flags.DEFINE_integer(
    'eval_groups', 100, 'Groups of an evaluation at the end.'
)
WAY = flags.DEFINE_integer(
    'way', None, 'Classes of a group; by default what suits the data.'
)
GROUP_CLIENTS = flags.DEFINE_integer(
    'group_clients',
    None,
    'Clients of a group; by default what suits the data.',
)
