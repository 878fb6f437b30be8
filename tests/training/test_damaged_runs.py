"""No byte of a run's directory makes the run wrong, or its checkpoints go.

Whatever is damaged: going on, repeating and evaluating end with the very
numbers of the undamaged run, or with an error that the programs show as a line.
"""

import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import shutil
from typing import NamedTuple

import mutations
import pytest

from tff_meta.training import checkpoints
from tff_meta.training import client_memories
from tff_meta.training import client_state_store
from tff_meta.training import evaluator as evaluator_lib
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols
from tff_meta.training import restored_run
from tff_meta.training import run
from tff_meta.training import run_config
from tff_meta.training import run_directory
from tff_meta.training import sealed_json

_ROUNDS = 4
_MORE_ROUNDS = 5
_VOLATILE = ('seconds_per_round_median', 'files')
# How often a file is damaged, for each that is damaged once.
_WEIGHTS = {'client_states.sqlite': 6, 'metrics.csv': 4, 'timings.csv': 3}


@dataclasses.dataclass(frozen=True)
class _Prepared(experiment_lib.Experiment):
  """An experiment whose process is built once for all tests."""

  process: object = None

  def build_process(self):
    return self.process


class _Whole(NamedTuple):
  """The undamaged run.

  Attributes:
    root: Its directory.
    experiment: What it is.
    models: Rounds -> the weights and memories that are evaluated after them.
    ends: Rounds -> what a run of so many rounds ends with.
  """

  root: pathlib.Path
  experiment: experiment_lib.Experiment
  models: dict
  ends: dict


def _experiment():
  """FedPer, whose clients keep their heads, with a best round."""
  config = run_config.resolve(
      algorithm='fed_per',
      preset='demo',
      dataset='synthetic',
      dataset_options='noise=3.0',
      partition='dirichlet',
      partition_options='alpha=5.0,min_examples=2',
      test_fraction=0.5,
      stratify=False,
      validation_fraction=0.2,
      num_clients=5,
      new_clients='held_out',
      clients_per_round=3,
      model='mlp',
      rounds=_ROUNDS,
      seed=0,
      execution='in_process',
      checkpoint_every=1,
      protocols=(protocols.KNOWN_CLIENTS,),
      eval_every=1,
      select_best=True,
      select_by='macro',
      patience=0,
      validation_groups=1,
      eval_groups=1,
      references=False,
  )
  plain = experiment_lib.prepare(config)
  return _Prepared(
      plain.config, plain.dataset, plain.model, plain.build_process()
  )


def _go_on(experiment, root, rounds, lines):
  """Begins, continues or repeats a run, as `binaries.train` does."""
  experiment = dataclasses.replace(
      experiment, config=experiment.config.replace(rounds=rounds)
  )
  directory = run_directory.RunDirectory(root)
  with directory.locked():
    return run.train_and_evaluate(
        experiment,
        experiment.process,
        evaluator_lib.Evaluator(experiment),
        directory,
        report=lines.append,
    )


def _bytes(arrays):
  return {k: (a.dtype.str, a.shape, a.tobytes()) for k, a in arrays.items()}


def _opened(experiment, root, lines):
  """Returns the rounds and all that `evaluate` and `analyze` compute with."""
  directory = run_directory.RunDirectory(root)
  config = restored_run.read_config(directory)
  expected = experiment.config.replace(rounds=config.training.rounds)
  assert config == expected, 'a damaged configuration is used'
  with restored_run.open_models(experiment, directory, lines.append) as models:
    states = client_state_store.SqliteStore(
        directory.client_states, read_only=True
    )
    with contextlib.closing(states):
      memories = client_memories.ClientMemories(
          experiment.process, states, models.rounds
      )
      kept = {
          client_id: _bytes(checkpoints.to_arrays(memories.of(client_id)))
          for client_id in experiment.dataset.client_ids()
      }
    weights = checkpoints.to_arrays(models.trained.weights)
    return models.rounds, (_bytes(weights), kept)


def _end(root, summary):
  """Returns everything that a run ends with, but for clock times.

  And but for what clients keep, which a finished run is not asked for.
  """
  numbers = {k: v for k, v in summary.items() if k not in _VOLATILE}
  store = checkpoints.CheckpointStore(root / 'checkpoints')
  newest = store.load_latest(pytest.fail)
  best = newest.best
  return (
      numbers,
      (root / 'metrics.csv').read_bytes(),
      (root / 'clients_known_clients.csv').read_bytes(),
      newest.position,
      _bytes(newest.server_state),
      (best.rounds, best.value, _bytes(best.server_state)),
  )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  experiment = _experiment()
  root = tmp_path_factory.mktemp('whole') / 'run'
  summary = _go_on(experiment, root, _ROUNDS, [])
  ends = {_ROUNDS: _end(root, summary)}
  models = {}
  for lost in range(3):
    copy = root.with_name(f'without_{lost}')
    shutil.copytree(root, copy)
    for path in sorted((copy / 'checkpoints').iterdir())[3 - lost :]:
      path.unlink()
    rounds, values = _opened(experiment, copy, [])
    models[rounds] = values
  copy = root.with_name('more')
  shutil.copytree(root, copy)
  summary = _go_on(experiment, copy, _MORE_ROUNDS, [])
  ends[_MORE_ROUNDS] = _end(copy, summary)
  rounds, values = _opened(experiment, copy, [])
  models[rounds] = values
  assert (
      list(models) == [4, 3, 2, 5] and len(set(map(str, models.values()))) == 4
  )
  return _Whole(root, experiment, models, ends)


def _places(root, rng):
  """Returns a place to damage: a file, or a directory, of a run."""
  files = [p for p in sorted(root.rglob('*')) if p.is_file()]
  weights = [_WEIGHTS.get(path.name, 1) for path in files]
  if rng.random() < 0.03:
    return root / rng.choice(['checkpoints', 'tensorboard'])
  (path,) = rng.choices(files, weights)
  return path


def _check_shown(error, root):
  """Checks that a program's line says what is wrong, or where."""
  assert str(error).startswith('Expected ') or str(root) in str(error), error


def _check(whole, root, seed, counts):
  """Damages a copy of the run, and uses it."""
  rng = random.Random(seed)
  shutil.copytree(whole.root, root)
  # Digits more often: what comes of them looks right.
  kinds = *mutations.KINDS, 'change a digit', 'change a digit'
  path, kind = _places(root, rng), rng.choice(kinds)
  if path.is_dir():
    mutations.mutate_directory(path, kind, rng)
  else:
    mutations.mutate(path, kind, rng)
  what = f'{seed}: {kind} of {path.relative_to(root)}'
  print(what, flush=True)
  before = mutations.state_of(root)
  try:
    rounds, values = _opened(whole.experiment, root, [])
  except (OSError, ValueError, TypeError) as error:
    counts['evaluations refused'] += 1
    print('  evaluate:', error)
    _check_shown(error, root)
  else:
    assert values == whole.models[rounds], what
    counts['evaluations right'] += 1
  # SQLite's own files come and go, and take over what is committed.
  after = mutations.state_of(root)
  for name in (before.keys() | after.keys()) - {'client_states.sqlite'}:
    if not name.startswith('client_states.sqlite-'):
      assert after.get(name) == before.get(name), f'{what}: {name} has changed'

  good = {
      name
      for name, content in mutations.state_of(whole.root).items()
      if name.startswith('checkpoints/') and before.get(name) == content
  }
  rounds, lines = rng.choice([_ROUNDS, _MORE_ROUNDS]), []
  try:
    summary = _go_on(whole.experiment, root, rounds, lines)
  except (
      OSError,
      run.AnotherConfigurationError,
      checkpoints.IncompatibleCheckpointError,
  ) as error:
    counts['continuations refused'] += 1
    print('  train:', error)
    _check_shown(error, root)
    now = mutations.state_of(root)
    store = checkpoints.CheckpointStore(root / 'checkpoints')
    for name in good:  # Stays, unless three newer ones are there.
      newer = [p for p in store.paths() if p.name > pathlib.Path(name).name]
      assert now.get(name) == before[name] or len(newer) == 3, what
  else:
    assert _end(root, summary) == whole.ends[rounds], what
    if rounds > _ROUNDS:
      opened = _opened(whole.experiment, root, [])
      assert opened == (rounds, whole.models[rounds]), what
    counts['continuations right'] += 1
  shutil.rmtree(root)


def _change(path, **changes):
  """Changes entries of a JSON file; None removes one."""
  content = json.loads(path.read_text()) | changes
  content = {k: v for k, v in content.items() if v is not None}
  path.write_text(json.dumps(content))


def test_a_summary_that_lost_its_checksum_is_made_again(whole, tmp_path):
  root, lines = tmp_path / 'run', []
  shutil.copytree(whole.root, root)
  _change(root / 'summary.json', sha256=None, evaluation={}, best_round=9)
  summary = _go_on(whole.experiment, root, _ROUNDS, lines)
  assert _end(root, summary) == whole.ends[_ROUNDS]
  assert 'summary.json as it was written, found it damaged' in lines[0]


def test_a_configuration_that_lost_its_checksum_is_made_again(whole, tmp_path):
  root, lines = tmp_path / 'run', []
  shutil.copytree(whole.root, root)
  _change(root / 'config.json', sha256=None, num_model_parameters=1)
  with pytest.raises(run_directory.RunDirectoryError, match='checksum is gone'):
    _opened(whole.experiment, root, [])
  summary = _go_on(whole.experiment, root, _ROUNDS, lines)
  assert _end(root, summary) == whole.ends[_ROUNDS]
  assert 'config.json' in lines[0]
  found, old = (
      sealed_json.read(at / 'config.json') for at in (root, whole.root)
  )
  codes = found.pop('code_of_rounds')
  assert found == old
  assert [c['from_round'] for c in codes] == [1, _ROUNDS + 1]
  assert codes[0]['git_commit'] is None  # Nobody knows.


def test_a_summary_of_an_earlier_version_is_made_again(whole, tmp_path):
  """It has no checksum, so nothing tells whether it is as it was."""
  root, lines = tmp_path / 'run', []
  shutil.copytree(whole.root, root)
  _change(root / 'config.json', sha256=None)
  _change(root / 'summary.json', sha256=None, best_round='x')
  summary = _go_on(whole.experiment, root, _ROUNDS, lines)
  assert _end(root, summary) == whole.ends[_ROUNDS]
  assert 'summary.json has no checksum' in lines[0]


def test_a_run_is_not_finished_with_other_hparams_of_its_reference(
    whole, tmp_path
):
  """Summaries of earlier versions do not have them, config.json does."""
  root = tmp_path / 'run'
  shutil.copytree(whole.root, root)
  evaluation = whole.experiment.config.evaluation
  other = dataclasses.replace(evaluation.reference_hparams, rounds=7)
  changed = dataclasses.replace(
      whole.experiment,
      config=whole.experiment.config.replace(reference_hparams=other),
  )
  summary = json.loads((root / 'summary.json').read_text())
  del summary['reference_hparams'], summary['sha256']
  (root / 'summary.json').write_text(json.dumps(sealed_json.seal(summary)))
  for experiment, is_finished in (
      (whole.experiment, True),
      (changed, False),
      (changed, True),
      (whole.experiment, False),
  ):
    lines = []
    _go_on(experiment, root, _ROUNDS, lines)
    assert is_finished == any('this run, finished' in line for line in lines)


def test_what_a_lost_configuration_said_of_the_code_is_not_known(
    whole, tmp_path
):
  root, lines = tmp_path / 'run', []
  shutil.copytree(whole.root, root)
  (root / 'config.json').unlink()
  (root / 'summary.json').unlink()
  _go_on(whole.experiment, root, _ROUNDS, lines)
  notes = [line for line in lines if 'has changed' in line]
  assert len(notes) == 1 and 'is not known' in notes[0]


def test_a_run_keeps_which_code_has_done_which_of_its_rounds(whole, tmp_path):
  """It goes on after 4 rounds, twice: the fifth is done again."""
  root = tmp_path / 'run'
  shutil.copytree(whole.root, root)
  now = sealed_json.read(root / 'config.json')
  for last in ('first', 'second'):
    of_last = sealed_json.read(root / 'config.json') | {'git_commit': last}
    (root / 'config.json').write_text(json.dumps(sealed_json.seal(of_last)))
    (root / 'checkpoints/round_000000005.ckpt').unlink(missing_ok=True)
    _go_on(whole.experiment, root, _MORE_ROUNDS, [])
    found = sealed_json.read(root / 'config.json')
    assert found.pop('code_of_rounds') == [
        {'from_round': r, 'git_commit': commit}
        | {part: now[part] for part in ('versions', 'environment')}
        for r, commit in ((1, 'first'), (5, now['git_commit']))
    ]
    assert found['git_commit'] == now['git_commit']
  (root / 'summary.json').unlink()  # Evaluated by what has done the fifth.
  _go_on(whole.experiment, root, _MORE_ROUNDS, [])
  again = sealed_json.read(root / 'config.json')
  assert [c['from_round'] for c in again['code_of_rounds']] == [1, 5]


def test_rounds_that_a_program_has_done_count(whole, tmp_path):
  root = tmp_path / 'run'
  shutil.copytree(whole.root, root)
  (root / f'program_states/program_state_{_ROUNDS + 1}').mkdir(parents=True)
  with pytest.raises(run.AnotherConfigurationError, match='at least 5, which'):
    _go_on(whole.experiment, root, _ROUNDS, [])


def test_a_program_without_a_checkpoint_is_told_when_it_has_one(
    whole, tmp_path
):
  root = tmp_path / 'run'
  shutil.copytree(whole.root, root)
  shutil.rmtree(root / 'checkpoints')
  for changes, when in (
      ({}, 'after --checkpoint_every rounds'),
      (
          {'driver': 'program', 'eval_every': 0, 'select_best': False},
          'when it ends or is stopped, with --driver=program',
      ),
  ):
    experiment = dataclasses.replace(
        whole.experiment, config=whole.experiment.config.replace(**changes)
    )
    with pytest.raises(FileNotFoundError, match=when):
      with restored_run.open_models(
          experiment, run_directory.RunDirectory(root), pytest.fail
      ):
        pass


def _check_all(whole, tmp_path, seeds):
  counts = collections.Counter()
  for done, seed in enumerate(seeds):
    if done and done % 50 == 0:
      print(f'{done} so far: {dict(counts)}', flush=True)
    _check(whole, tmp_path / 'run', seed, counts)
  print(f'{len(seeds)} damaged runs: {dict(counts)}')
  assert counts['continuations right'] and counts['continuations refused']


@pytest.mark.ci
def test_a_damaged_run_is_right_or_refused(whole, tmp_path):
  _check_all(whole, tmp_path, range(8))


@pytest.mark.slow
def test_many_damaged_runs_are_right_or_refused(whole, tmp_path):
  _check_all(whole, tmp_path, range(1000, 1350))
