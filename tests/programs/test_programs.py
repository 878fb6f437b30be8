"""Programs do what the loop does, wherever they are interrupted."""

import asyncio
import collections
import contextlib
import datetime
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import episodes
from tff_meta import fitting
from tff_meta.client_works import client_work
from tff_meta.programs import cohorts
from tff_meta.programs import context
from tff_meta.programs import evaluation
from tff_meta.programs import train
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import loop
from tff_meta.training import metric_writers
from tff_meta.training import run
from tff_meta.training import run_config
from tff_meta.training import run_directory


@pytest.fixture(scope='module')
def experiment():
  """Clients of FedRep keep their heads."""
  return experiment_lib.prepare(
      run_config.resolve(
          **fitting._SETTINGS
          | dict(algorithm='fed_rep', dataset='digits', model='mlp', rounds=5)
          | dict(seed=3, protocols=('none',))
      )
  )


@pytest.fixture(scope='module')
def process(experiment):
  return experiment.build_process()


def _source(experiment, process):
  return cohorts.CohortSource(
      experiment.cohort,
      experiment.dataset.tff_client_data,
      process.next.type_signature.parameter[1].member,
  )


def _run(experiment, process, root, rounds, **options):
  """Returns the newest state after a program, and what clients keep."""
  store = client_state_store.SqliteStore(root / 'clients.sqlite')
  states = tff.program.FileProgramStateManager(str(root / 'states'))
  metrics = tff.program.CSVFileReleaseManager(str(root / 'metrics.csv'))
  source = _source(experiment, process)

  async def program():
    await train.train_model(
        process,
        source,
        clients_per_round=experiment.config.training.clients_per_round,
        rounds=rounds,
        states=states,
        client_states=store,
        metrics=metrics,
        **options,
    )
    saved, _ = await states.load_latest(
        tff.learning.programs.ProgramState(
            process.initialize(), 0, 0, source.iterator()
        )
    )
    return saved

  inner = tff.framework.get_context_stack().current
  with tff.framework.get_context_stack().install(context.ProgramContext(inner)):
    saved = asyncio.run(program())
  kept = {name: store.read(name) for name in store.client_ids()}
  store.close()
  return checkpoints.to_arrays(saved.state), kept


def _train(experiment, process, root, rounds, **options):
  """Begins a run in a directory, or goes on, as `binaries.train` does."""
  directory = run_directory.RunDirectory(root)
  root.mkdir(exist_ok=True)
  store = client_state_store.SqliteStore(directory.client_states)
  with contextlib.closing(store):
    return train.train(
        process,
        experiment.cohort,
        experiment.dataset.tff_client_data,
        loop.NO_EVALUATION,
        client_states=store,
        directory=directory,
        config={},
        schedule=loop.Schedule(rounds, checkpoint_every=1, eval_every=0),
        checkpoint=run.find_checkpoint(
            directory, {}, process, store, pytest.fail
        ),
        **dict(should_stop=lambda: False, report=pytest.fail) | options,
    )


class _Told(dict):
  """A writer: what it was told of which round."""

  def append(self, round_num, values):
    self[round_num] = values

  def flush(self):
    self.flushed = dict(self)


def _assert_equal(found, expected):
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.ci
def test_a_program_that_goes_on_ends_like_the_loop(
    experiment, process, tmp_path
):
  """State, memories, and the metrics of every round."""
  store, state = client_state_store.InMemoryStore(), process.initialize()
  source = _source(experiment, process)
  for round_num in range(1, 6):
    cohort = source.select(round_num)
    state = loop.next_round(process, state, *cohort, store).state

  _run(experiment, process, tmp_path, 2)
  # Of a round that was not saved: it is forgotten.
  database = client_state_store.SqliteStore(tmp_path / 'clients.sqlite')
  database.roll_back(2)
  some = experiment.cohort(1)[0]
  database.write(some, 3, {'x': np.zeros(2)})
  database.commit({2, 3})
  database.close()
  found, kept = _run(experiment, process, tmp_path, 5)

  _assert_equal(found, checkpoints.to_arrays(state))
  assert sorted(kept) == sorted(store.client_ids())
  for name, arrays in kept.items():
    _assert_equal(arrays, store.read(name))
  rows = (tmp_path / 'metrics.csv').read_text().splitlines()
  assert [row.partition(',')[0] for row in rows[1:]] == list('12345')


@pytest.mark.ci
def test_states_need_the_memories_of_their_round(experiment, process, tmp_path):
  _run(experiment, process, tmp_path, 2)
  (tmp_path / 'clients.sqlite').unlink()
  with pytest.raises(client_state_store.ClientStateError, match='round 2'):
    _run(experiment, process, tmp_path, 3)


@pytest.mark.ci
@pytest.mark.parametrize('what', ['states', 'metrics'])
def test_what_fails_in_the_background_fails_the_program(
    experiment, process, tmp_path, monkeypatch, what
):
  """TFF logs it, and would go on, or wait for ever."""

  async def fail(*args, **kwargs):
    raise OSError('disk full')

  if what == 'states':
    saved = tff.program.FileProgramStateManager.save

    async def save(self, state, version):
      await (fail() if version else saved(self, state, version))

    monkeypatch.setattr(tff.program.FileProgramStateManager, 'save', save)
  else:
    monkeypatch.setattr(tff.program.CSVFileReleaseManager, 'release', fail)
  with pytest.raises(OSError, match='disk full'):
    _run(experiment, process, tmp_path, 2)


@pytest.mark.ci
def test_a_round_waits_for_the_state_before_it(
    experiment, process, tmp_path, monkeypatch
):
  """Else the states of short rounds pile up, and a kill loses them all."""
  steps, saved = [], tff.program.FileProgramStateManager.save
  done = loop.next_round

  async def save(self, state, version):
    await asyncio.sleep(0.1)  # Longer than a round.
    await saved(self, state, version)
    steps.append(f'saved {version}')

  def next_round(process, state, round_num, *others):
    steps.append(f'round {round_num}')
    return done(process, state, round_num, *others)

  monkeypatch.setattr(tff.program.FileProgramStateManager, 'save', save)
  monkeypatch.setattr(loop, 'next_round', next_round)
  _run(experiment, process, tmp_path, 3)
  expected = [
      'saved 0',
      *(f'{w} {n}' for n in (1, 2, 3) for w in ('round', 'saved')),
  ]
  assert steps == expected


@pytest.mark.ci
@pytest.mark.parametrize('version', [1, 2, None])
def test_a_program_that_is_stopped_has_saved_its_rounds_or_fails(
    experiment, process, tmp_path, monkeypatch, version
):
  """It is stopped after round 2, which is saved while it ends."""
  saved = tff.program.FileProgramStateManager.save

  async def save(self, state, at):
    if at == version:
      raise OSError('disk full')
    await saved(self, state, at)

  monkeypatch.setattr(tff.program.FileProgramStateManager, 'save', save)
  asked = iter([False, True])
  arguments = experiment, process, tmp_path, 5
  if version is None:
    assert _train(*arguments, should_stop=lambda: next(asked)).rounds == 2
  else:
    with pytest.raises(OSError, match='disk full'):
      _train(*arguments, should_stop=lambda: next(asked))


def test_what_a_killed_program_leaves_is_gone_on_from_or_named(
    experiment, process, tmp_path, monkeypatch
):
  """It is killed in round 5, after it had ended with round 1."""
  whole, root = tmp_path / 'whole', tmp_path / 'run'
  expected = _train(experiment, process, whole, 5)
  _train(experiment, process, root, 1)
  done = loop.next_round

  def next_round(process, state, round_num, *others):
    if round_num == 5:
      raise RuntimeError('killed')
    return done(process, state, round_num, *others)

  with monkeypatch.context() as patch:
    patch.setattr(loop, 'next_round', next_round)
    with pytest.raises(RuntimeError, match='killed'):
      _train(experiment, process, root, 5)
  for name, problem in (
      ('program_states', 'the state after round 1, .* found that after'),
      ('program_metrics.csv', 'the metrics of rounds 2 to 4, found none of'),
  ):
    (root / name).rename(tmp_path / name)
    with pytest.raises(run_directory.RunDirectoryError, match=problem):
      _train(experiment, process, root, 5)
    (tmp_path / name).rename(root / name)
  (root / 'program_metrics.csv').rename(tmp_path / 'metrics')
  os.mkfifo(root / 'program_metrics.csv')
  with pytest.raises(OSError, match='a plain file, found a pipe'):
    _train(experiment, process, root, 5)
  (tmp_path / 'metrics').rename(root / 'program_metrics.csv')
  told = _Told()
  trained = _train(experiment, process, root, 5, writers=[told])
  _assert_equal(
      *(checkpoints.to_arrays(end.state) for end in (trained, expected))
  )
  metrics = [(path / 'metrics.csv').read_bytes() for path in (whole, root)]
  assert metrics[0] == metrics[1] and metrics[0].count(b'\n') == 6
  columns = metric_writers.read_metrics(root / 'metrics.csv')
  rounds = columns.pop('round')
  assert told.flushed == {
      r: metric_writers.for_people({n: c[i] for n, c in columns.items()})
      for i, r in enumerate(rounds)
      if r > 1
  }
  # metrics.csv has what program_metrics.csv does not have any more.
  (root / 'program_metrics.csv').unlink()
  _train(experiment, process, root, 6)
  assert (root / 'metrics.csv').read_bytes().startswith(metrics[0])


def test_a_program_that_begins_forgets_what_clients_kept(
    experiment, process, tmp_path
):
  """Its states are lost, and it has no checkpoint yet."""
  for name in ('whole', 'run'):
    (tmp_path / name).mkdir()
  _, expected = _run(experiment, process, tmp_path / 'whole', 1)
  _run(experiment, process, tmp_path / 'run', 2)
  shutil.rmtree(tmp_path / 'run/states')
  _, found = _run(experiment, process, tmp_path / 'run', 1)
  assert found.keys() == expected.keys()
  for name, arrays in expected.items():
    _assert_equal(found[name], arrays)


def test_an_iterator_is_its_position():
  source = cohorts.CohortSource(
      lambda round_num: [f'client_{round_num}'],
      lambda client_id: client_id.upper(),
      tff.TensorType(np.str_),
  )
  iterator = source.iterator()
  assert iterator.select(1) == (1, [('client_1', 'CLIENT_1')])
  restored = type(iterator).from_bytes(iterator.to_bytes())
  assert restored == iterator and restored.select(1).round_num == 2
  with pytest.raises(ValueError, match='the 1 clients of a cohort, found 2'):
    iterator.select(2)


def _clients(experiment, kept=()):
  """Two clients, with what they have kept where clients keep something."""
  rng = np.random.default_rng(0)
  for number, salt in enumerate((4, 9)):
    x = rng.normal(size=[30, *experiment.model.input_shape]).astype(np.float32)
    y = np.arange(30, dtype=np.int32) % 3
    batches = [collections.OrderedDict(x=x[:20], y=y[:20])]
    batches.append(collections.OrderedDict(x=x[20:], y=y[20:]))
    support, query = map(tf.data.Dataset.from_tensors, batches)
    data = collections.OrderedDict(
        support=support,
        query=query,
        salt=tf.data.Dataset.from_tensors(np.int32(salt)),
    )
    if kept:
      data['memory'] = client_work.memory_dataset(
          kept[number].value,
          kept[number].value if kept[number].present else None,
      )
    yield data


def _num_right(personalizer, weights, client, memory=()):
  """Returns how many of a client's ten queries it predicts."""
  (support,), (query,), (salt,) = (
      client[name] for name in ('support', 'query', 'salt')
  )
  seed = tf.random.experimental.stateless_fold_in(tf.constant([3, 0]), salt)
  adapted = personalizer.adapt(weights, memory, _examples(**support), seed)
  labels = personalizer.predict(adapted, _examples(**query))
  return np.sum(labels == query['y'])


@pytest.mark.ci
@pytest.mark.parametrize(
    'use, secure',
    [('new_client', False), ('new_client', True), ('known_client', False)],
)
def test_an_evaluation_is_what_clients_do(experiment, process, use, secure):
  """Of two clients, the first of whom has kept a head if it is known."""
  personalizer = getattr(experiment.method, use)()
  weights = process.get_model_weights(process.initialize()).trainable
  is_known = use == 'known_client'
  initial = process.initial_memory if is_known else None
  own = [(), ()]
  if is_known:
    kept = tf.nest.map_structure(lambda a: np.float32(1) - a, initial)
    own = [
        client_work.ClientMemory(tf.constant(True), kept),
        client_work.ClientMemory(tf.constant(False), initial),
    ]
  evaluate = evaluation.build_evaluation(
      personalizer,
      process.get_model_weights.type_signature.result.trainable,
      experiment.model.input_shape,
      initial_memory=initial,
      secure=secure,
  )
  clients = list(_clients(experiment, own if is_known else ()))
  expected = [
      _num_right(personalizer, weights, client, memory)
      for client, memory in zip(clients, own, strict=True)
  ]
  metrics = evaluate(weights, clients)
  assert 0 < sum(expected) < 20
  if is_known:  # The memory decides.
    assert expected[0] != _num_right(personalizer, weights, clients[0], own[1])
  np.testing.assert_allclose(metrics['accuracy'], sum(expected) / 20, rtol=1e-3)
  np.testing.assert_allclose(metrics['num_clients'], 2, rtol=1e-3)


@pytest.mark.ci
def test_a_program_evaluates_on_the_way(experiment, process, tmp_path):
  """After rounds 2 and 3, by TFF's manager."""
  personalizer = experiment.method.new_client()
  evaluating = evaluation.build_process(
      process, personalizer, experiment.model.input_shape
  )
  clients = dict(enumerate(_clients(experiment)))
  released = tff.program.MemoryReleaseManager()
  total = tff.program.MemoryReleaseManager()
  manager = tff.learning.programs.EvaluationManager(
      cohorts.EvaluationSource(
          lambda round_num: list(clients),
          clients.get,
          evaluating.next.type_signature.parameter[1].member,
      ),
      total,
      lambda name: tff.program.FileProgramStateManager(str(tmp_path / name)),
      lambda name: (evaluating, released),
      cohort_size=2,
      duration=datetime.timedelta(0),
  )
  _run(
      experiment,
      process,
      tmp_path,
      3,
      evaluation=manager,
      evaluate_every=2,
  )

  store, state = client_state_store.InMemoryStore(), process.initialize()
  source = _source(experiment, process)
  for round_num in (1, 2, 3):
    cohort = source.select(round_num)
    state = loop.next_round(process, state, *cohort, store).state
    if round_num > 1:
      weights = process.get_model_weights(state).trainable
      expected = [
          _num_right(personalizer, weights, c) for c in clients.values()
      ]
      for values in (released, total):
        found = values.values()[round_num]['model_metrics']
        np.testing.assert_allclose(found['accuracy'], sum(expected) / 20)
        assert found['num_clients'] == 2
  assert released.values().keys() == total.values().keys() == {2, 3}


def _examples(x, y):
  return episodes.Examples(tf.constant(x), tf.constant(y), tf.ones(len(y)))


def _saved_rounds(root):
  """Returns how many rounds a program has saved."""
  names = [path.name for path in (root / 'program_states').glob('*')]
  found = [name.removeprefix('program_state_') for name in names]
  return max((int(name) for name in found if name.isdigit()), default=0)


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', ['fed_rep', 'frl'])
def test_a_program_that_is_killed_twenty_times_ends_alike(algorithm, tmp_path):
  """FRL also within episodes."""

  def command(root):
    return [
        *(sys.executable, '-m', 'binaries.train', f'--algorithm={algorithm}'),
        *('--rounds=200', '--driver=program', '--protocol=none'),
        f'--output_dir={root}',
    ]

  subprocess.run(command(tmp_path / 'whole'), check=True, capture_output=True)
  killed, rng = 0, random.Random(0)
  while killed < 20:
    process = subprocess.Popen(
        command(tmp_path / 'killed'),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    before = _saved_rounds(tmp_path / 'killed')
    while process.poll() is None:
      if _saved_rounds(tmp_path / 'killed') > before:
        break  # It has gone on.
      time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    assert process.poll() is None, 'It ended before it was killed often enough.'
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed += 1
  saved = _saved_rounds(tmp_path / 'killed')
  last = subprocess.run(
      command(tmp_path / 'killed'), check=True, capture_output=True, text=True
  )
  assert f'Continuing after round {saved} of 200' in last.stderr
  for name in ('metrics.csv', 'program_metrics.csv'):
    whole, other = (
        (tmp_path / run / name).read_bytes() for run in ('whole', 'killed')
    )
    assert whole == other
  states = [
      checkpoints.CheckpointStore(tmp_path / run / 'checkpoints').load_latest(
          print
      )
      for run in ('whole', 'killed')
  ]
  _assert_equal(states[1].server_state, states[0].server_state)
