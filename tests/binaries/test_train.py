"""The program itself, called with flags: what it writes and what it refuses."""

import csv
import dataclasses
import errno
import fcntl
import json
import re

from absl import flags as absl_flags
from absl.testing import flagsaver
import numpy as np
import pytest
from tensorboard.backend.event_processing import (
    plugin_event_accumulator as event_accumulator,
)
from tensorboard.util import tensor_util
import tensorflow as tf

from binaries import command_line
from binaries import evaluate
from binaries import train
from tff_meta import datasets
from tff_meta import machine
from tff_meta import models
from tff_meta import registry
from tff_meta.data import corpus as corpus_lib
from tff_meta.training import atomic_files
from tff_meta.training import checkpoints
from tff_meta.training import metric_writers
from tff_meta.training import run as run_lib
from tff_meta.training import run_config
from tff_meta.training import trackers

_TINY = (
    '--algorithm=frl',
    '--dataset=synthetic',
    '--model=mlp',
    '--rounds=5',
    '--checkpoint_every=2',
    '--eval_groups=2',
)


@pytest.mark.parametrize(
    'flags, reason',
    [
        (['--partition=shards'], 'frl has no use for clients of '),
        (
            [
                '--algorithm=fed_avg',
                '--test_fraction=0',
                '--hparams=fine_tuning_steps=5,epochs=1',
            ],
            'no client has examples to be tested on. Tip: w',
        ),
    ],
    ids=str,
)
def test_a_run_that_nothing_can_evaluate_says_so(
    call, tmp_path, monkeypatch, flags, reason
):
  """Before it is trained, which it is not here."""
  trained = {'evaluation': {}}
  monkeypatch.setattr(run_lib, 'train_and_evaluate', lambda *_, **__: trained)
  code, _, err = call(train, *_TINY, *flags, f'--output_dir={tmp_path / "run"}')
  assert code == 0
  assert f'nothing will be evaluated: {reason}' in err
  # Where others could evaluate something.
  is_of_frl = 'fed_avg' not in flags[0]
  assert ('few_round has groups with new classes' in err) == is_of_frl
  # As it says what has no effect.
  no_effect = 'fine_tuning_steps has no effect: fed_avg does not read it.'
  assert (no_effect in err, 'epochs has' in err) == (not is_of_frl, False)


@pytest.mark.ci
def test_a_run_that_nothing_can_evaluate_is_trained_to_its_end(call, tmp_path):
  run = tmp_path / 'run'
  code, _, err = call(
      train,
      *_TINY,
      '--algorithm=fed_avg',
      '--test_fraction=0',
      '--rounds=1',
      f'--output_dir={run}',
  )
  assert code == 0 and 'nothing will be evaluated: no client has' in err, err
  summary = json.loads((run / 'summary.json').read_text())
  assert (summary['rounds'], summary['evaluation']) == (1, {})


def test_a_run_leaves_everything_a_reader_needs(call, tmp_path, monkeypatch):
  directory = tmp_path / 'runs' / 'first'
  code, out, _ = call(train, *_TINY, f'--output_dir={directory}')

  assert code == 0
  assert 'new_groups (2 groups' in out
  for row in ('trained model', 'initial model', 'FedAvg from scratch'):
    assert row in out
  summary = json.loads((directory / 'summary.json').read_text())
  expected = {
      'algorithm': 'frl',
      'dataset': 'synthetic',
      'preset': 'paper',
      'rounds': 5,
      'seed': 0,
  }
  assert expected.items() <= summary.items()
  assert summary['seconds_per_round_median'] > 0
  result = summary['evaluation']['new_groups']
  low, high = result['accuracy_interval_95']
  assert low <= result['accuracy_mean'] <= high
  assert result['num_groups'] == 2
  lines = (directory / 'groups_new_groups.csv').read_text().splitlines()
  assert len(lines) == 3
  assert set(result['references']) == {'untrained', 'fed_avg_from_scratch'}
  with open(directory / 'metrics.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert [row['round'] for row in rows] == ['1', '2', '3', '4', '5']
  assert all(float(row['train/loss']) >= 0 for row in rows)
  png = (directory / 'learning_curve.png').read_bytes()
  assert png.startswith(b'\x89PNG') and len(png) > 5_000
  assert list((directory / 'tensorboard').iterdir())
  content = json.loads((directory / 'config.json').read_text())
  assert content['config']['hparams']['rounds'] == 3
  assert content['config']['way'] == 3
  assert content['data']['fingerprint']
  # FRL by distance has no classifier; a network has one for its classes.
  body = content['num_server_parameters']
  num_classes = content['data']['num_classes']
  network = models.build(
      content['config']['model'], content['data']['input_shape'], num_classes
  )
  head = network.num_parameters() - body
  assert head == num_classes * (network.embedding_size + 1)
  assert content['num_model_parameters'] == body + head
  assert content['num_client_values'] == 0
  a_round = content['client_bytes_per_round']
  assert 8 * body < a_round['down'] < 9 * body  # Both of FRL's bodies.
  assert 4 * body < a_round['up'] < 5 * body
  assert summary['client_bytes_per_round'] == a_round
  num_clients = content['config']['clients_per_round']
  for name, of_one in a_round.items():
    assert summary['training_bytes'][name] == 5 * num_clients * of_one
    assert {row[f'train/bytes_{name}'] for row in rows} == {
        str(num_clients * of_one)
    }
  assert content['versions']['tensorflow-federated'] == '0.87.0'
  assert content['environment'] == machine.environment()
  assert content['environment'].keys() == {
      'TF_ENABLE_ONEDNN_OPTS',
      'TF_NUM_INTRAOP_THREADS',
  }
  config = run_config.from_json(content['config'])
  assert config.to_json() == content['config']

  _check_finished(call, directory)
  _check_evaluation(call, directory)
  _check_a_full_disk(call, directory, monkeypatch)
  _check_refusals(call, directory)


@pytest.mark.ci
def test_in_tffs_worker_a_run_is_the_same_to_rounding(call, tmp_path):
  losses = []
  for execution in ('native', 'in_process'):
    directory = tmp_path / execution
    flags = (f'--execution={execution}', '--protocol=none', '--rounds=2')
    code, _, _ = call(train, *_TINY, *flags, f'--output_dir={directory}')
    assert code == 0
    read = metric_writers.read_metrics(directory / 'metrics.csv')
    losses.append(read['train/loss'])
  assert len(losses[0]) == 2
  np.testing.assert_allclose(*losses, rtol=1e-5)


def _check_finished(call, directory):
  code, out, err = call(train, *_TINY, f'--output_dir={directory}')
  assert code == 0 and 'finished: 5 rounds' in err
  assert 'trained model' in out and 'untrained' in out
  run = (*_TINY, '--noreferences', f'--output_dir={directory}')
  code, out, err = call(train, *run)
  assert code == 0 and 'Evaluating new_groups: trained model' in err
  assert 'trained model' in out and 'untrained' not in out


def _check_evaluation(call, directory):
  code, out, err = call(
      evaluate,
      f'--run_dir={directory}',
      '--protocol=new_groups',
      '--eval_groups=3',
      '--eval_seed=5',
      '--references',
  )
  assert code == 0 and f'Written to {directory}/evaluation.' in err
  assert 'After 5 rounds of 5' in out and 'new_groups (3 groups' in out
  result = json.loads((directory / 'evaluation/new_groups.json').read_text())
  assert (result['num_groups'], result['seed']) == (3, 5)
  assert set(result['references']) == {'untrained', 'fed_avg_from_scratch'}
  code, _, err = call(
      evaluate, f'--run_dir={directory}', '--protocol=known_clients'
  )
  assert code == 2 and 'offers: new_groups, new_groups_iid' in err
  code, _, err = call(
      evaluate, f'--run_dir={directory}', '--eval_support_fraction=0.5'
  )
  assert code == 2 and 'with --eval_support_fraction, found new_groups' in err


def _check_a_full_disk(call, directory, monkeypatch):
  def write_bytes(path, data):
    del data
    raise OSError(errno.ENOSPC, 'No space left on device', str(path))

  flags = (
      f'--run_dir={directory}',
      '--protocol=new_groups_iid',
      '--eval_groups=2',
      '--noreferences',
  )
  with monkeypatch.context() as patch:
    patch.setenv('TF_NUM_INTRAOP_THREADS', '7')
    patch.setattr(atomic_files, 'write_bytes', write_bytes)
    code, out, err = call(evaluate, *flags)
  assert (code, out) == (1, '')
  assert 'TF_NUM_INTRAOP_THREADS: "1" -> "7"), so results may differ' in err
  assert 'Error: ' in err and 'No space left on device' in err
  assert 'groups_new_groups_iid.csv' in err and 'Traceback' not in err


def _check_refusals(call, directory):
  where = f'--output_dir={directory}'
  code, _, err = call(train, *_TINY, where, '--algorithm=fed_avg')
  assert code == 2 and 'algorithm: "frl" -> "fed_avg"' in err
  assert re.search(r'; and \d+ more\. Tip: give another --output_dir', err)
  code, _, err = call(train, *_TINY, where, '--rounds=4')
  assert code == 2 and 'at least 5' in err
  (directory / 'comparison.json').write_text('{}')
  code, _, err = call(train, *_TINY, where)
  assert code == 2 and 'a comparison of binaries.compare' in err
  (directory / 'comparison.json').unlink()
  with open(directory / '.lock', 'a') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    code, _, err = call(train, *_TINY, where)
  assert code == 1 and 'another process' in err
  config = (directory / 'config.json').read_bytes()
  (directory / 'config.json').write_text('{}')
  code, _, err = call(evaluate, f'--run_dir={directory}')
  assert code == 1 and 'config.json as it was written' in err
  summary = (directory / 'summary.json').rename(directory / 'aside')
  code, _, err = call(evaluate, f'--run_dir={directory}')
  assert code == 2 and 'of this version' in err
  summary.rename(directory / 'summary.json')
  (directory / 'config.json').write_bytes(
      config.replace(b'"way": 3', b'"way": 2')
  )
  code, _, err = call(evaluate, f'--run_dir={directory}')
  assert code == 1 and 'its checksum does not match its content' in err
  code, _, err = call(train, *_TINY, where, '--noreferences')
  assert code == 0 and 'config.json' in err and 'It is made again.' in err
  before = json.loads(config)
  again = json.loads((directory / 'config.json').read_bytes())
  unknown, _ = again.pop('code_of_rounds')
  assert unknown == {'from_round': 1, 'git_commit': None}
  assert again | {'sha256': before['sha256']} == before
  (directory / 'evaluation').rename(directory / 'before')
  (directory / 'evaluation').symlink_to('nothing')
  code, _, err = call(evaluate, f'--run_dir={directory}')
  assert code == 1 and 'evaluation to be a directory, found a link to' in err


@pytest.mark.ci
def test_known_clients_and_evaluation_on_the_way(call, tmp_path):
  """With FedPer, whose clients keep their heads."""
  command = (
      *_TINY,
      '--algorithm=fed_per',
      '--partition=dirichlet',
      '--partition_options=alpha=5.0,min_examples=2',
      '--test_fraction=0.5',
      '--validation_fraction=0.2',
      '--num_clients=5',
      '--num_new_clients=3',
      '--rounds=2',
      '--eval_every=2',
      '--select_best',
      f'--output_dir={tmp_path}/run',
  )
  code, out, _ = call(train, *command)
  assert code == 0
  assert 'known_clients (5 clients' in out and 'new_clients (3 clients' in out
  assert 'Best round, 2:' in out
  directory = tmp_path / 'run'
  with open(directory / 'metrics.csv', newline='') as file:
    first, second = csv.DictReader(file)
  assert first['validation_clients/accuracy'] == ''
  best = float(second['validation_clients/accuracy'])
  assert 0 <= best <= 1
  summary = json.loads((directory / 'summary.json').read_text())
  assert summary['best_round'] == 2
  assert summary['best_round_validation'] == best
  assert summary['last_ten_evaluations_mean'] == {
      'validation_clients/accuracy': best
  }
  assert summary['evaluation_best'] == summary['evaluation']  # The last one.
  for name in ('known_clients', 'new_clients'):
    result = summary['evaluation'][name]
    assert 0 <= result['share_hurt'] <= 1
    assert set(result['references']) == {'untrained'}
    for suffix in ('', '_best'):
      lines = (directory / f'clients_{name}{suffix}.csv').read_text()
      assert len(lines.splitlines()) == result['num_clients'] + 1
  _check_evaluation_of_clients(call, directory, summary)
  _check_spread_asked_for_later(call, command, directory, summary)


def _check_spread_asked_for_later(call, command, directory, summary):
  """What a finished run has not measured it measures when it is repeated."""
  code, out, _ = call(train, *command, '--nvar')
  assert code == 0 and 'nVAR' in out
  later = json.loads((directory / 'summary.json').read_text())
  for rounds in ('evaluation', 'evaluation_best'):
    assert later[rounds]['known_clients'].pop('nvar') > 0
  assert later.pop('nvar') is True and summary.pop('nvar') is False
  assert later.pop('sha256') != summary.pop('sha256') and later == summary
  run = f'--run_dir={directory}'
  code, out, _ = call(evaluate, run, '--protocol=known_clients', '--nonvar')
  assert code == 0 and 'nVAR' not in out
  code, _, err = call(evaluate, run, '--protocol=new_clients', '--nvar')
  assert code == 2 and 'known_clients to be evaluated with --nvar' in err


def _arrays(directory):
  """Returns the state of the server and of the clients after a run."""
  store = checkpoints.CheckpointStore(directory / 'checkpoints')
  checkpoint = store.load_latest(pytest.fail)
  return checkpoint.server_state, checkpoint.position.client_states


class _Tracker:
  """Keeps what it is told."""

  def __init__(self, run):
    self.run, self.rounds, self.final, self.num_closed = run, {}, {}, 0

  def append(self, round_num, values):
    self.rounds[round_num] = values

  def finish(self, round_num, values):
    self.final[round_num] = values

  def flush(self):
    pass

  def close(self):
    self.num_closed += 1


@pytest.mark.ci
def test_accuracy_is_measured_on_the_way_and_changes_nothing(
    call, tmp_path, monkeypatch
):
  """As long as nobody says otherwise; FedPer's clients keep their heads."""
  command = (
      *_TINY,
      '--algorithm=fed_per',
      '--partition=iid',
      '--num_clients=25',
      '--num_new_clients=3',
      '--rounds=20',
  )
  seen, opened = tmp_path / 'seen', []
  kept = trackers.Tracker(lambda run: opened.append(_Tracker(run)) or opened[0])
  monkeypatch.setitem(trackers.TRACKERS, 'kept', kept)
  options = f'--output_dir={seen}', '--track=kept'
  code, *printed = call(train, *command, *options)
  assert (
      code == 0 and ''.join(printed).count(': accuracy of known clients ') == 10
  )
  columns = metric_writers.read_metrics(seen / 'metrics.csv')
  known = columns['known_clients/accuracy']
  evaluated = [r for r in range(20) if not np.isnan(known[r])]
  assert evaluated == list(range(1, 20, 2))
  assert not np.isnan(columns['new_clients/accuracy'][19])
  events = event_accumulator.EventAccumulator(str(seen / 'tensorboard'))
  events.Reload()
  shown = {
      tag: {
          event.step: float(tensor_util.make_ndarray(event.tensor_proto))
          for event in events.Tensors(tag)
      }
      for tag in events.Tags()['tensors']
      if 'accuracy' in tag
  }
  assert shown['known_clients/accuracy_percent'] == pytest.approx(
      {r + 1: 100 * known[r] for r in evaluated}
  )
  summary = json.loads((seen / 'summary.json').read_text())
  final = summary['evaluation']['new_clients']
  for name, expected in (
      ('final/new_clients', final),
      ('final/new_clients/untrained', final['references']['untrained']),
  ):
    found = shown[f'{name}/accuracy_percent']
    assert found == pytest.approx({20: 100 * expected['accuracy_mean']})
  (tracker,) = opened
  assert (tracker.run.done, tracker.run.config['seed']) == (0, 0)
  assert list(tracker.rounds) == list(range(1, 21))
  for told in (*tracker.rounds.items(), *tracker.final.items()):
    for name, value in told[1].items():
      if name in shown:
        assert shown[name][told[0]] == pytest.approx(value)
  assert shown.keys() <= tracker.rounds[20].keys() | tracker.final[20].keys()
  assert tracker.num_closed == 1

  unseen = tmp_path / 'unseen'
  options = '--eval_every=0', f'--output_dir={unseen}'
  assert call(train, *command, *options)[0] == 0
  without = metric_writers.read_metrics(unseen / 'metrics.csv')
  assert without == {name: columns[name] for name in without}
  for one, other in zip(_arrays(seen), _arrays(unseen), strict=True):
    np.testing.assert_equal(one, other)


def _config(*flags):
  """Returns the configuration that flags mean."""
  with flagsaver.flagsaver():
    assert absl_flags.FLAGS(['train', *flags]) == ['train']
    return train.configuration()


@pytest.mark.parametrize(
    'begun, expected',
    [
        ([], [3, 5, 20, True]),
        (['--eval_every=0'], [0, 20, None, False]),
        (['--eval_every=15'], [15, 20, None, True]),
    ],
)
def test_a_continued_run_is_evaluated_as_it_was_begun(
    tmp_path, begun, expected
):
  command = (*_TINY, '--algorithm=fed_avg', f'--output_dir={tmp_path}')
  config = _config(*command, '--rounds=30', *begun).to_json()
  (tmp_path / 'config.json').write_text(json.dumps({'config': config}))
  found = _config(*command, '--rounds=60').to_json()
  settings = run_config.settings_of_the_run(found)
  assert list(settings.values()) == [*expected, 1]
  assert found == config | {'rounds': 60}


@pytest.mark.ci
def test_what_tells_nothing_on_the_way_is_measured_only_if_asked_for(
    call, tmp_path
):
  """New groups of FedAvg begin with random weights."""
  command = (*_TINY, '--algorithm=fed_avg', '--partition=few_round')
  command += ('--hparams=rounds=1', f'--output_dir={tmp_path}/run')
  config = tmp_path / 'run/config.json'
  code, out, err = call(train, *command)
  assert code == 0 and 'is measured on the way' in err
  assert 'in new_groups fed_avg begins with random weights' in err
  assert '  from scratch ' in out and 'trained model' not in out
  assert json.loads(config.read_text())['config']['eval_every'] == 0
  code, _, err = call(train, *command, '--rounds=6', '--noreferences')
  assert code == 0 and 'Continuing after round 5 of 6' in err
  code, _, err = call(train, *command, '--rounds=6', '--eval_every=2')
  assert code == 2 and 'eval_every: 0 -> 2' in err
  asked = ('--rounds=1', '--eval_every=1', f'--output_dir={tmp_path}/asked')
  code, _, err = call(train, *command, '--noreferences', *asked)
  assert code == 0 and 'is measured on the way' not in err
  assert 'round 1: accuracy of ' in err


@pytest.mark.ci
def test_the_best_round_for_new_classes_and_the_end_of_patience(call, tmp_path):
  """By the share of all examples of clients of validation classes.

  With such a rate clients soon get worse. A run that has ended out of patience
  is finished; another patience goes on.
  """
  directory = tmp_path / 'run'
  flags = (
      *_TINY,
      '--algorithm=metavers',
      '--partition=few_round',
      '--hparams=shots=2,queries=2,warm_up_rounds=0,learning_rate=0.1',
      '--rounds=60',
      '--eval_every=1',
      '--select_best',
      '--select_by=micro',
      '--validation_groups=3',
      f'--output_dir={directory}',
  )
  code, out, err = call(train, *flags, '--patience=1')
  assert code == 0 and 'new_class_clients (2 groups' in out
  assert 'dropped more than 1 times since round' in err
  with open(directory / 'metrics.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  column = 'validation_new_class_clients/accuracy'
  assert all(0 <= float(row[column]) <= 1 for row in rows)
  shares = [float(row[f'{column}_micro']) for row in rows]
  assert len(set(shares)) > 1
  summary = json.loads((directory / 'summary.json').read_text())
  rounds = summary['rounds']
  assert rounds == len(rows) < 60 and summary['ended_by_patience'] == 1
  assert summary['best_round'] == 1 + shares.index(max(shares)) < rounds
  assert summary['best_round_validation'] == max(shares)
  for suffix, part in ('', 'evaluation'), ('_best', 'evaluation_best'):
    result = summary[part]['new_class_clients']
    path = directory / f'clients_new_class_clients{suffix}.csv'
    lines = path.read_text().splitlines()
    assert len(lines) == result['num_clients'] + 1
  code, _, err = call(train, *flags, '--patience=1')
  assert code == 0 and f'finished: {rounds} rounds' in err
  code, _, err = call(train, *flags, '--patience=2')
  assert code == 0 and f'Continuing after round {rounds} of 60' in err
  summary = json.loads((directory / 'summary.json').read_text())
  assert summary['rounds'] > rounds


def _check_evaluation_of_clients(call, directory, summary):
  """As in the run, and on a share of the test examples."""
  code, _, err = call(evaluate, f'--run_dir={directory}')
  assert code == 0 and 'will be replaced' not in err
  assert 'environment' not in err
  found = json.loads((directory / 'evaluation/known_clients.json').read_text())
  expected = summary['evaluation']['known_clients']
  assert expected.items() <= found.items()
  assert found['way'] is found['group_clients'] is None
  code, _, err = call(evaluate, f'--run_dir={directory}', '--eval_groups=3')
  assert code == 2 and 'to be tested with --eval_groups, found known_' in err
  code, _, err = call(
      evaluate,
      f'--run_dir={directory}',
      '--protocol=new_clients',
      '--eval_support_fraction=0.5',
  )
  assert code == 0
  replaced = re.findall(r'evaluation/(\w+)\.json will be replaced', err)
  assert replaced == ['new_clients']
  with open(directory / 'evaluation/clients_new_clients.csv') as file:
    rows = list(csv.DictReader(file))
  with open(directory / 'clients_new_clients.csv') as file:
    for row, whole in zip(rows, csv.DictReader(file), strict=True):
      parts = int(row['num_support']), int(row['num_examples'])
      assert sum(parts) == int(whole['num_examples'])
      assert 0 <= parts[1] - parts[0] <= 1


@pytest.mark.parametrize(
    'flags, code, message',
    [
        (['--algorithm=fedd'], 2, '`algorithm` to be one of frl, metavers'),
        (['--algorithm=fedrep'], 2, "did you mean 'fed_rep'?"),
        (['--algorithm='], 2, 'Expected --algorithm, found none'),
        (['--dataset=imagenet'], 2, 'one of digits, digit_pairs'),
        (['--dataset_options=sigma=1'], 2, 'Known: num_classes'),
        (['--dataset_options=noise=-1'], 2, '`noise` >= 0'),
        (['--augmentation=crop=4'], 2, 'Known: crop_padding, flip'),
        (['--augmentation=crop_padding=-1'], 2, 'to be a whole number of at'),
        (['--augmentation=crop_padding=99'], 2, 'less than the sides'),
        (
            ['--algorithm=metavers', '--dataset=digits']
            + ['--partition=iid', '--augmentation=flip=true'],
            2,
            'draws minibatches',
        ),
        (['--preset=best'], 2, 'preset'),
        (['--hparams=alpha=1'], 2, 'Known: uniform, classifier, gpal'),
        (['--reference_hparams=alpha=1'], 2, 'option of fed_avg, found'),
        (['--hparams=rounds=three'], 2, '`rounds` to be a whole number'),
        (['--hparams=support_fraction=2'], 2, '`support_fraction`'),
        (['--hparams=classifier=svm'], 2, 'one of distance, linear'),
        (['--rounds=many'], 2, 'rounds'),
        (
            ['--rounds=0'],
            2,
            '--rounds=0: expected a whole number of at least 1',
        ),
        (['--seed=-1'], 2, '--seed=-1: expected a whole number of at'),
        (['--execution=native', '--device=gpu'], 2, 'knows no GPU'),
        (['--execution=native', '--mixed_precision'], 2, 'knows no GPU'),
        (['--model=vgg'], 2, '`model` to be one of'),
        (['--partition=random'], 2, 'one of few_round, iid'),
        (['--partition=pieces_per_class'], 2, '`classes_per_client`'),
        (['--partition_options=alpha=1'], 2, 'Known: examples_per_class'),
        (['--num_clients=7'], 2, 'multiple'),
        (['--num_clients=5', '--clients_per_round=6'], 2, 'at most'),
        (['--way=6'], 2, '(`way`), found 5'),
        (['--partition=shards', '--way=3'], 2, 'tested in none, found way 3'),
        (
            [
                '--partition=shards',
                '--algorithm=fed_avg',
                '--hparams=',
                '--test_fraction=0',
                '--protocol=known_clients',
            ],
            2,
            'Tip: with a `test_fraction` of 0',
        ),
        (['--way=1'], 2, '--way=1: expected a whole number of at least 2'),
        (['--group_clients=4'], 2, '3 or 6 clients would do'),
        (['--eval_groups=0'], 2, 'expected a whole number of at least 1'),
        (
            [
                '--dataset_options=examples_per_class=1,test_examples_per_class=2'
            ],
            2,
            'images',
        ),
        (['--protocol=new_people'], 2, 'protocols of new_groups'),
        (['--protocol=known_clients'], 2, 'offers: new_groups'),
        (['--nvar'], 2, 'known_clients to be evaluated with --nvar, found new'),
        (['--test_fraction=0.2'], 2, 'no `test_fraction`'),
        (['--num_new_clients=2'], 2, 'no `num_new_clients`'),
        (['--eval_support_fraction=2'], 2, 'between 0 and 1'),
        (
            ['--eval_support_fraction=0.5'],
            2,
            'known_clients, new_clients to be tested with --eval_support_f',
        ),
        (
            ['--restrict_f1_to_client_labels'],
            2,
            'tested with --restrict_f1_to_client_labels, found new_groups.\n',
        ),
        (['--new_clients=bought'], 2, 'one of held_out, redealt'),
        (['--select_best', '--eval_every=0'], 2, '`eval_every` to be at least'),
        (['--validation_clients=0'], 2, 'expected a whole number of at least'),
        (['--select_by=median'], 2, 'select_by'),
        (['--patience=2'], 2, '`select_best` with `patience` 2'),
        (['--select_by=micro'], 2, "`select_best` with `select_by` 'micro'"),
        (
            [
                '--algorithm=fed_avg_ft',
                '--partition=iid',
                '--eval_every=1',
                '--select_best',
            ],
            2,
            '--validation_fraction',
        ),
        (['--partition=iid', '--eval_every=1'], 2, 'found nobody: '),
        (
            [
                '--algorithm=metavers',
                '--partition=iid',
                '--hparams=shots=99,queries=7',
            ],
            2,
            'two classes with `shots` (99) examples at least, and `queries` (7)'
            ' more of each or,',
        ),
        (['--dataset=mnist', '--data_dir=/nowhere'], 1, '/nowhere'),
        (['--output_dir='], 2, 'flag --output_dir=: expected'),
        (['--output_dir=/proc/run'], 1, 'able to write to /proc/run'),
        (['--speed=3'], 2, 'speed'),
        (['more'], 2, "'more'"),
        (['--flagfile=/nowhere/table1.flags'], 2, 'table1.flags'),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, list) else None,
)
def test_bad_input_ends_with_one_line(call, tmp_path, flags, code, message):
  directory = tmp_path / 'run'
  found, out, err = call(train, *_TINY, f'--output_dir={directory}', *flags)

  assert message in err
  assert (found, out, err.count('\n')) == (code, '', 1)
  assert err.startswith('Error: ')
  assert not directory.exists()


def test_without_flags_an_algorithm_is_asked_for(call):
  code, _, err = call(train)
  assert code == 2 and err.startswith('Error: Expected --algorithm, found none')


def test_settings_that_a_run_has_may_be_given_again(call, tmp_path):
  """Earlier versions took them from runs that test no client with them."""
  config = {'eval_support_fraction': 0.5}
  (tmp_path / 'config.json').write_text(json.dumps({'config': config}))
  for fraction, more, refused in (
      (0.5, ['--restrict_f1_to_client_labels'], 'restrict_f1_to_client_labels'),
      (0.4, [], 'eval_support_fraction'),
  ):
    flags = (f'--eval_support_fraction={fraction}', *more, '--eval_every=0')
    code, _, err = call(train, *_TINY, *flags, f'--output_dir={tmp_path}')
    assert code == 2 and f'to be tested with --{refused}, found' in err, err


def test_what_is_wrong_with_a_value_first_in_training_is_a_line(
    call, tmp_path, monkeypatch
):
  def fail(*_, **__):
    raise ValueError('Expected one,\nfound another.')

  monkeypatch.setattr(run_lib, 'train_and_evaluate', fail)
  where = tmp_path / 'run'
  code, _, err = call(train, *_TINY, f'--output_dir={where}')
  assert code == 2 and err.endswith('Error: Expected one, found another.\n')
  assert not where.exists()


def test_nan_pixels_end_with_one_line(call, tmp_path, monkeypatch):
  synthetic = datasets.get('synthetic')

  def load(data_dir, download):
    corpus = synthetic.load(data_dir, download)
    x = corpus.train.x.copy()
    x[7, 0, 0, 0] = np.nan
    train_part = corpus_lib.LabelledExamples(x, corpus.train.y)
    return dataclasses.replace(corpus, train=train_part)

  spec = dataclasses.replace(synthetic, load=load)
  monkeypatch.setitem(datasets.DATASETS, 'synthetic', spec)
  code, _, err = call(train, *_TINY, f'--output_dir={tmp_path}/run')
  assert code == 2 and err.count('\n') == 1 and 'finite' in err


@pytest.mark.ci
def test_a_run_that_learns_nothing_shows_no_accuracy(call, tmp_path):
  """And the same command, which has no round to do, says so again."""
  directory = tmp_path / 'run'
  flags = (
      '--algorithm=fed_avg',
      '--dataset=synthetic',
      '--model=mlp',
      '--partition=iid',
      '--rounds=2',
      '--eval_every=1',
      '--noreferences',
      '--hparams=learning_rate=1e30',
      f'--output_dir={directory}',
  )
  code, out, err = call(train, *flags)
  lines = err.splitlines()
  (warning,) = (line for line in lines if line.startswith('Warning'))
  error = lines[-1]

  assert code == 1 and 'round 2/2  loss nan' in err
  assert warning.startswith('Warning: 3 clients of round 1 sent numbers that')
  assert error.startswith('Error: In none of 2 rounds has a client trained')
  assert '6 sent numbers that are not finite, 0 had labels of' in error
  assert 'interval' not in out and not (directory / 'summary.json').exists()
  assert len(list((directory / 'checkpoints').iterdir())) == 1

  code, out, again = call(train, *flags)
  assert (code, out, again.splitlines()[-1]) == (1, '', error)
  code, _, err = call(evaluate, f'--run_dir={directory}')
  assert code == 0 and 'Warning: In none of 2 rounds has a client' in err


def test_a_client_without_examples_ends_with_one_line(call, tmp_path):
  code, _, err = call(
      train,
      *_TINY,
      f'--output_dir={tmp_path}/run',
      '--partition=iid',
      '--num_clients=2000',
  )
  assert code == 2 and err.count('\n') == 1 and '2000' in err


def test_a_run_directory_without_a_run_is_refused(call, tmp_path):
  code, _, err = call(evaluate, f'--run_dir={tmp_path}')
  assert code == 1 and err.count('\n') == 1 and 'config.json' in err


def test_the_list_names_everything(call):
  code, out, _ = call(train, '--list')
  assert code == 0
  for name in (*datasets.DATASETS, 'frl', 'fed_avg', 'personalized_fl'):
    assert f'  {name} ' in out


@pytest.mark.parametrize('algorithm', list(registry.ALGORITHMS))
def test_the_list_of_an_algorithm_says_what_each_hparam_is(call, algorithm):
  code, out, _ = call(train, '--list', f'--algorithm={algorithm}')
  assert code == 0
  meanings, presets = out.split('Presets (--preset)\n')
  configs = registry.get(algorithm).presets
  for field in dataclasses.fields(configs['paper']):
    assert f'\n  {field.name}: ' in meanings
    (line,) = re.findall(rf'^  {field.name}: (.*)$', presets, re.MULTILINE)
    values = {p: getattr(c, field.name) for p, c in configs.items()}
    if len(set(values.values())) > 1:
      assert line == ', '.join(f'{p} {v}' for p, v in values.items())
    else:
      assert line == str(values['paper'])


@pytest.mark.parametrize(
    'execution',
    [
        pytest.param('in_process', marks=pytest.mark.ci),
        pytest.param('native', marks=pytest.mark.slow),
    ],
)
def test_an_operation_that_fails_is_a_line_and_leaves_no_directory(
    call, tmp_path, execution
):
  """Some 500 GB for an order of examples, in this process and in a worker."""
  where = tmp_path / 'run'
  flags = (*_TINY, '--algorithm=fed_avg', f'--output_dir={where}')
  code, _, err = call(
      train,
      *flags,
      '--hparams=epochs=2147483647',
      f'--execution={execution}',
  )
  assert code == 1
  *_, problem = err.splitlines()  # Behind lines of progress.
  assert problem.startswith('Error: Expected TensorFlow to compute, found ')
  assert 'OOM when allocating tensor with shape[' in problem
  assert not where.exists()
  code, _, err = call(train, *flags, '--hparams=batch_size=999999999999999')
  assert code == 2 and err.count('\n') == 1 and '`batch_size`' in err
  assert not where.exists()


def test_an_eager_operation_that_fails_is_a_line(capfd):
  with pytest.raises(SystemExit), command_line.reported_failures():
    tf.reshape(tf.zeros([2]), [3])
  assert capfd.readouterr().err == (
      'Error: Expected TensorFlow to compute, found InvalidArgumentError: Input'
      ' to reshape is a tensor with 2 values, but the requested shape has 3\n'
  )


def test_the_list_of_an_unknown_algorithm(call):
  code, _, err = call(train, '--list', '--algorithm=fedsgd')
  assert code == 2 and "found 'fedsgd'" in err


def test_the_algorithm_alone_is_enough(call, tmp_path, monkeypatch):
  """The digits, with rates that suit them, and a directory named after both."""
  monkeypatch.chdir(tmp_path)
  code, out, _ = call(train, '--algorithm=fed_avg', '--rounds=1', '--model=mlp')
  assert code == 0 and 'known_clients (20 clients' in out
  content = json.loads(
      (tmp_path / 'runs/digits_fed_avg/config.json').read_text()
  )
  assert content['config']['preset'] == 'demo'


@pytest.mark.ci
def test_few_round_learning_has_pairs_of_digits(call, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  flags = ('--algorithm=frl', '--rounds=4', '--eval_groups=2')
  code, out, _ = call(train, *flags, '--noreferences')
  assert code == 0 and 'new_groups (2 groups' in out
  content = json.loads(
      (tmp_path / 'runs/digit_pairs_frl/config.json').read_text()
  )
  expected = {'dataset': 'digit_pairs', 'preset': 'demo', 'way': 5}
  assert expected.items() <= content['config'].items()
  other = _config('--algorithm=fed_avg', '--partition=few_round').to_json()
  assert expected.items() <= other.items()


def test_flags_of_a_file_are_read(call, tmp_path):
  flagfile = tmp_path / 'bad.flags'
  flagfile.write_text('--rounds=0\n')
  code, _, err = call(
      train,
      *_TINY[:3],
      f'--flagfile={flagfile}',
      f'--output_dir={tmp_path}/run',
  )
  assert code == 2 and '--rounds=0: expected' in err
