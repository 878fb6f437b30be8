"""The flag files: every one can be run, and says what it is meant to say."""

import pathlib

from absl import flags
from absl.testing import flagsaver
import pytest

from binaries import train

_ROOT = pathlib.Path(__file__).parents[2]
_PRESETS = _ROOT / 'binaries' / 'presets'
_NAMES = sorted(path.stem for path in _PRESETS.glob('*.flags'))
_METAVERS = 'metavers_cifar10_50'
_FEDEC = 'fedec_cifar10_100_2'
_RMNIST = ('none', 'dirichlet_1000', 'dirichlet_5', 'dirichlet', 'shards')


@pytest.fixture
def resolve(monkeypatch):
  """Returns a function from a flag file and more flags to a `RunConfig`."""
  monkeypatch.chdir(_ROOT)  # Flag files name others from there.

  def run(name, *more):
    with flagsaver.flagsaver():
      flags.FLAGS(['train', f'--flagfile=binaries/presets/{name}.flags', *more])
      return train._config()

  return run


@pytest.mark.parametrize('name', _NAMES)
def test_a_flag_file_is_whole(resolve, name):
  """It has a comment, and flags that make a configuration."""
  lines = (_PRESETS / f'{name}.flags').read_text().splitlines()
  assert lines[0].startswith('# ')
  assert all(line.startswith(('# ', '--')) for line in lines)
  resolve(name)


def test_the_first_command_of_the_readme_is_that_of_frl_alone(resolve):
  with flagsaver.flagsaver():
    flags.FLAGS(['train', '--algorithm=frl'])
    alone = train._config()
  assert resolve('digit_pairs_frl') == alone


def _differences(one, other):
  one, other = one.identity(), other.identity()
  return {name for name in one if one[name] != other[name]}


_COMPARED = [
    *((f'fed_per_{data}', f'fed_avg_{data}') for data in ('mnist', 'cifar10')),
    *(
        (f'fed_per_meta_{data}', f'fed_avg_{data}')
        for data in ('mnist', 'cifar10')
    ),
    *(
        (name, _METAVERS)
        for name in _NAMES
        if name.startswith('metavers_cifar10_')
        and not name[-1].isdigit()
        and not name.endswith(('_local', '_lg_fed_avg', '_pfedhn'))
    ),
    *(
        (name, _FEDEC)
        for name in _NAMES
        if name.startswith(f'{_FEDEC}_') and name != f'{_FEDEC}_local'
    ),
    *(
        (f'{algorithm}_rmnist_{cell}', f'cafeme_rmnist_{cell}')
        for algorithm in (
            'ditto',
            'fed_avg_ft',
            'fed_rep',
            'ifca_ft',
            'per_fed_avg',
        )
        for cell in _RMNIST
    ),
]


# Everybody adapts at the test.
_TESTED_LATE = (f'{_FEDEC}_per_fed_avg', f'{_FEDEC}_pfedme')


@pytest.mark.parametrize('baseline, compared_with', _COMPARED)
def test_a_baseline_sees_the_same_data(resolve, baseline, compared_with):
  """Clients, rounds and evaluation are those of what it is compared with."""
  allowed = {'algorithm', 'preset', 'hparams'}
  if '_rmnist_' in baseline:
    allowed.add('model')  # The same network without gates.
  if baseline in _TESTED_LATE:
    allowed.add('eval_from')  # Only the last ten rounds count.
  differences = _differences(resolve(baseline), resolve(compared_with))
  assert 'algorithm' in differences and differences <= allowed


@pytest.mark.parametrize('baseline', _TESTED_LATE)
def test_long_tests_are_in_the_rounds_that_count(resolve, baseline):
  config = resolve(baseline)
  assert (
      config.training.rounds,
      config.training.eval_every,
      config.training.eval_from,
  ) == (100, 1, 91)


def test_how_many_baselines_there_are():
  """The four papers' own tables: MetaVers, FedEC, FedMeta-Per, CAFeMe."""
  assert len(_COMPARED) == 15 + 11 + 4 + 25


@pytest.mark.parametrize('algorithm', ['fed_per', 'fed_per_meta'])
@pytest.mark.parametrize('data, rate', [('mnist', 1e-5), ('cifar10', 1e-4)])
def test_the_rates_of_fedmeta_per(resolve, algorithm, data, rate):
  config = resolve(f'{algorithm}_{data}')
  assert config.algorithm == algorithm
  hparams = config.hparams
  assert (hparams.optimizer, hparams.learning_rate) == ('adam', rate)
  assert (hparams.epochs, hparams.batch_size) == (1, 32)
  assert hparams.head_of_evaluation == 'averaged'
  assert hparams.fine_tuning_epochs == (algorithm == 'fed_per_meta')


def test_local_training_as_metavers_has_it(resolve):
  """A hundred episodes of everybody, and all else as there."""
  config = resolve('metavers_cifar10_local')
  metavers = resolve(_METAVERS)
  assert _differences(config, metavers) == {
      'algorithm',
      'preset',
      'hparams',
      'clients_per_round',
      'eval_every',
  }
  assert (config.training.rounds, config.training.clients_per_round) == (
      1,
      config.data.num_clients,
  )
  hparams = config.hparams
  assert (hparams.training, hparams.episodes) == ('episodes', 100)
  assert (hparams.shots, hparams.queries) == (20, 30)
  for name in ('optimizer', 'learning_rate', 'weight_decay'):
    assert getattr(hparams, name) == getattr(metavers.hparams, name)


@pytest.mark.parametrize('num_clients, size', [(50, 13), (100, 26), (500, 126)])
def test_pfedhn_as_its_code_has_it(resolve, num_clients, size):
  """Section 6: 5000 rounds of one client, and all else as MetaVers."""
  config = resolve('metavers_cifar10_pfedhn', f'--num_clients={num_clients}')
  assert _differences(config, resolve(f'metavers_cifar10_{num_clients}')) == {
      'algorithm',
      'hparams',
      'clients_per_round',
      'eval_every',
  }
  assert (config.training.rounds, config.training.clients_per_round) == (
      5000,
      1,
  )
  assert config.training.eval_every == 250
  assert config.hparams.embedding_size == size


def test_other_cells_of_a_table_by_one_flag(resolve):
  config = resolve('metavers_cifar10_fed_babu', '--num_clients=500')
  assert _differences(config, resolve('metavers_cifar10_500')) == {
      'algorithm',
      'preset',
      'hparams',
  }
  assert config.hparams.decay_rounds == config.training.rounds == 1001
  hparams = config.hparams
  assert (hparams.fine_tuning_epochs, hparams.fine_tuning_batch_size) == (10, 0)
  assert hparams.learning_rate == hparams.fine_tuning_learning_rate == 0.01
  for cell in (50, 100, 500):
    name = f'metavers_cifar10_{cell}'
    ablation = resolve(name, '--algorithm=metavers_triplet')
    assert ablation.hparams.loss == 'triplet'
    assert _differences(ablation, resolve(name)) == {'algorithm', 'hparams'}


def test_settings_of_the_code_of_fed_rep(resolve):
  """FedRep's code: SGD 0.01, momentum 0.5, batches of 10."""
  methods = ('apfl', 'fed_avg', 'fed_per', 'fed_rep', 'lg_fed_avg', 'local')
  for method in methods:
    hparams = resolve(f'{_FEDEC}_{method}').hparams
    assert (hparams.learning_rate, hparams.momentum) == (0.01, 0.5)
    assert hparams.batch_size == 10
  local = resolve(f'{_FEDEC}_local')
  assert local.training.clients_per_round == local.data.num_clients == 100
  assert local.training.rounds * local.hparams.epochs == 100


@pytest.mark.parametrize('cell', _RMNIST)
def test_settings_of_ditto_in_the_code_of_cafeme(resolve, cell):
  """Five steps of a kept Adam, five of SGD; all rates 0.001, mu 0.1."""
  hparams = resolve(f'ditto_rmnist_{cell}').hparams
  assert (hparams.optimizer, hparams.client_optimizer_state) == (
      'adam',
      'persist',
  )
  assert hparams.learning_rate == hparams.personal_learning_rate == 0.001
  assert (hparams.local_unit, hparams.epochs) == ('steps', 5)
  assert hparams.personal_epochs == 5 and hparams.uniform
  assert hparams.proximal_weight == 0.1


@pytest.mark.parametrize('cell', _RMNIST)
def test_settings_of_fed_rep_in_the_code_of_cafeme(resolve, cell):
  """Both dense layers are the head; training images alone are dealt."""
  config = resolve(f'fed_rep_rmnist_{cell}')
  assert config.algorithm == 'cafeme_fed_rep' and config.model == 'cafeme_base'
  hparams = config.hparams
  assert (hparams.head_layers, hparams.client_optimizer_state) == (2, 'persist')
  assert (hparams.head_steps, hparams.base_steps) == (5, 1)
  assert not config.data.deal_test_images
  assert config.data.dataset_options['rotation_interpolation'] == 'nearest'


@pytest.mark.parametrize('cell', _RMNIST)
def test_curves_of_51_points(resolve, cell):
  """CAFeMe's code: 50 steps at 0.001, falling by 0.8 every five steps."""
  for algorithm in ('ditto', 'fed_avg_ft', 'fed_rep', 'per_fed_avg'):
    config = resolve(f'{algorithm}_rmnist_{cell}')
    hparams = config.hparams
    assert config.evaluation.curve and config.evaluation.protocols == (
        'new_clients',
    )
    assert hparams.fine_tuning_steps == 50 and hparams.batch_size == 30
    assert hparams.fine_tuning_decay == 0.8
    assert hparams.fine_tuning_decay_steps == 5
    rate = 'fine_tuning_learning_rate'
    if algorithm == 'fed_avg_ft':
      rate = 'deployment_learning_rate'
      assert hparams.deployment_batch_size == 30
    assert getattr(hparams, rate) == 0.001
