"""Runs that are killed and continued end as the uninterrupted run does."""

import contextlib
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import mutations
import psutil
import pytest

from binaries import train
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import trackers

_ROOT = pathlib.Path(__file__).parents[2]
_ROUNDS = 62  # Fifteen and a half FRL episodes of four rounds.
_TIMEOUT_SECONDS = 900  # Shared machines can be slow.
_COMMON_FLAGS = (
    '--dataset=synthetic',
    '--dataset_options=noise=3.0',
    '--model=mlp',
    '--num_clients=10',
    f'--rounds={_ROUNDS}',
    '--checkpoint_every=3',
)
_FLAGS = (
    '--algorithm=frl',
    *_COMMON_FLAGS,
    '--preset=release',
    '--hparams=meta_learning_rate=0.05',
    '--eval_every=5',
    '--validation_groups=1',
    '--protocol=none',
)
# Clients that keep a head and its learning rates, and a best round.
_STATEFUL_FLAGS = (
    '--algorithm=fedmeta_per',
    *_COMMON_FLAGS,
    '--preset=paper',
    '--hparams=inner=meta_sgd,inner_learning_rate=0.01,outer_learning_rate=0.05',
    '--clients_per_round=4',
    '--num_new_clients=2',
    '--validation_fraction=0.2',
    '--eval_every=4',
    '--select_best',
)
_FEWER = 32  # Rounds, where all comes once.
_FEWER_FLAGS = (*_STATEFUL_FLAGS, f'--rounds={_FEWER}')


def _start(directory, *flags, base=_FLAGS):
  log = open(f'{directory}.log', 'ab')
  with log:
    return subprocess.Popen(
        [
            *(sys.executable, '-m', 'binaries.train'),
            *(*base, f'--output_dir={directory}', *flags),
        ],
        cwd=_ROOT,
        stdout=log,
        stderr=log,
    )


def _log(directory):
  return pathlib.Path(f'{directory}.log').read_text()


def _rows(directory):
  try:
    return (directory / 'metrics.csv').read_bytes().count(b'\n') - 1
  except FileNotFoundError:
    return 0


def _stop_after(directory, process, rows, delay, signal_num):
  """Signals the process some time after it has written that many rows."""
  deadline = time.monotonic() + _TIMEOUT_SECONDS
  while _rows(directory) < rows and time.monotonic() < deadline:
    assert process.poll() is None, _log(directory)
    time.sleep(0.005)
  time.sleep(delay)
  workers = [
      child
      for child in psutil.Process(process.pid).children(recursive=True)
      if child.name() == 'worker_binary'
  ]
  process.send_signal(signal_num)
  code = process.wait(_TIMEOUT_SECONDS)
  _, alive = psutil.wait_procs(workers, timeout=20)
  assert not [w for w in alive if w.status() != psutil.STATUS_ZOMBIE]
  return code


def _finish(directory, base=_FLAGS):
  process = _start(directory, base=base)
  assert process.wait(_TIMEOUT_SECONDS) == 0, _log(directory)


def _contents(arrays):
  return {
      name: (array.dtype.str, array.shape, array.tobytes())
      for name, array in arrays.items()
  }


def _final_state(directory):
  store = checkpoints.CheckpointStore(directory / 'checkpoints')
  checkpoint = store.load_latest(pytest.fail)
  assert checkpoint.position.rounds == _rows(directory)
  best = checkpoint.best
  best = best and (best.rounds, best.value, _contents(best.server_state))
  return _contents(checkpoint.server_state), best


def _client_states(directory):
  """What clients keep, after the last round and, if looked for, the best."""
  store = checkpoints.CheckpointStore(directory / 'checkpoints')
  last, best = _rows(directory), store.load_latest(pytest.fail).best
  states = client_state_store.SqliteStore(
      directory / 'client_states.sqlite', read_only=True
  )
  with contextlib.closing(states):
    return {
        (client_id, rounds): _contents(states.read(client_id, rounds))
        for rounds in {last, best.rounds if best else last}
        for client_id in states.client_ids(rounds)
    }


def _assert_same_run(directory, whole, rounds=_ROUNDS):
  assert _final_state(directory) == _final_state(whole)
  metrics = (directory / 'metrics.csv').read_bytes()
  assert metrics == (whole / 'metrics.csv').read_bytes()
  assert metrics.count(b'\n') == rounds + 1
  assert not list(directory.rglob('*.tmp'))


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  directory = tmp_path_factory.mktemp('whole') / 'run'
  _finish(directory)
  return directory


@pytest.mark.slow
def test_killed_interrupted_and_continued_is_the_whole_run(whole, tmp_path):
  directory = tmp_path / 'run'
  _stop(directory, _FLAGS, _KILL, _INTERRUPT)
  _finish(directory)
  assert 'Traceback' not in _log(directory)
  _assert_same_run(directory, whole)


@pytest.mark.ci
def test_killed_and_damaged_runs_end_as_the_whole_run(call, tmp_path):
  """What clients keep, too: their heads and rates, bit by bit."""
  whole, directory = tmp_path / 'whole', tmp_path / 'run'
  _continue(call, whole)
  _check_a_damaged_checkpoint_and_cut_metrics(call, whole, tmp_path / 'damaged')
  _check_a_finished_run_and_another_configuration(call, whole)
  _stop(directory, _FEWER_FLAGS, _KILL)
  _continue(call, directory)

  _assert_same_run(directory, whole, _FEWER)
  states = _client_states(directory)
  assert states == _client_states(whole)
  last = [state for (_, rounds), state in states.items() if rounds == _FEWER]
  assert len(last) == 10
  assert all(len(state) > 1 for state in last)  # Heads and rates.
  summaries = [
      json.loads((d / 'summary.json').read_text()) for d in (directory, whole)
  ]
  for part in ('evaluation', 'evaluation_best', 'best_round'):
    assert summaries[0][part] == summaries[1][part]
  _check_a_lost_file_of_client_states(call, directory, tmp_path / 'lost.sqlite')


def _continue(call, directory, *flags):
  """Trains in this process; returns what is said."""
  code, _, err = call(train, *_FEWER_FLAGS, f'--output_dir={directory}', *flags)
  assert code == 0, err
  return err


def _check_a_damaged_checkpoint_and_cut_metrics(call, whole, directory):
  shutil.copytree(whole, directory)
  (directory / 'summary.json').unlink()
  config = json.loads((whole / 'config.json').read_text())
  config['versions']['numpy'] = '0.1'
  del config['environment'], config['sha256']  # As before they were written.
  (directory / 'config.json').write_text(json.dumps(config))
  newest = directory / 'checkpoints' / f'round_{_FEWER:09d}.ckpt'
  content = bytearray(newest.read_bytes())
  content[len(content) // 2] ^= 1
  newest.write_bytes(content)
  lines = (whole / 'metrics.csv').read_bytes().splitlines(keepends=True)
  # 30 rounds and half of the next row: the checkpoint of round 30 still fits.
  (directory / 'metrics.csv').write_bytes(b''.join(lines[:31]) + lines[31][:5])

  said = _continue(call, directory)

  _assert_same_run(directory, whole, _FEWER)
  assert _client_states(directory) == _client_states(whole)
  assert f'Checkpoint {newest} cannot be used' in said
  assert 'Continuing after round 30' in said
  assert 'has changed since (versions.numpy: "0.1" ->' in said
  assert 'environment' in said.split('has changed since')[1].splitlines()[0]


def _check_a_finished_run_and_another_configuration(call, whole):
  before = _files_and_states(whole)
  assert f'finished: {_FEWER} rounds' in _continue(call, whole)
  flags = (*_FEWER_FLAGS, f'--output_dir={whole}', '--seed=5', '--rounds=80')
  code, _, err = call(train, *flags)
  assert code == 2
  refusal = err.splitlines()[-1]
  assert refusal.startswith('Error: ') and 'seed: 0 -> 5' in refusal
  assert _files_and_states(whole) == before


def _files_and_states(directory):
  """All but the bytes of the database, which SQLite writes as it likes."""
  files = {p: p.read_bytes() for p in directory.rglob('*') if p.is_file()}
  del files[directory / 'client_states.sqlite']
  return files, _client_states(directory)


def _check_a_lost_file_of_client_states(call, directory, lost):
  """It ends the run that needs it, and nothing else is lost."""
  (directory / 'client_states.sqlite').rename(lost)
  before = mutations.state_of(directory)
  more = f'--rounds={_FEWER + 1}'

  code, _, err = call(train, *_FEWER_FLAGS, f'--output_dir={directory}', more)

  assert code == 1
  line = err.splitlines()[-1]
  assert line.startswith(f'Error: Expected {directory}/client_states.sqlite,')
  assert mutations.state_of(directory) == before
  lost.rename(directory / 'client_states.sqlite')
  said = _continue(call, directory, more)
  assert f'Continuing after round {_FEWER} of {_FEWER + 1}' in said


# First and last round of those it may come after, the signal, the exit code.
_KILL = (1, 25, signal.SIGKILL, -9)
_INTERRUPT = (35, 50, signal.SIGINT, 130)


def _stop(directory, base, *stops):
  """Stops the run at random rounds, each time in a process of its own."""
  seed = random.randrange(2**31)
  print(f'kill points of seed {seed}')
  rng = random.Random(seed)
  for first, last, signal_num, code in stops:
    process = _start(directory, base=base)
    rows, delay = rng.randint(first, last), rng.uniform(0, 0.05)
    print(f'signal {signal_num} after {rows} rows and {delay:.3f} s')
    assert code == _stop_after(
        directory, process, rows, delay, signal_num
    ), _log(directory)
  assert 'Traceback' not in _log(directory)


@pytest.mark.ci
@pytest.mark.parametrize('aggregation', ['robust', 'secure', 'dp'])
def test_a_killed_run_goes_on_under_every_aggregation(
    call, tmp_path, aggregation
):
  """Bit by bit, but for the noise of private ones, which is new."""
  base = (*_FEWER_FLAGS, f'--aggregation={aggregation}')
  if aggregation == 'dp':
    base += ('--aggregation_options=noise_multiplier=10',)
  directory, whole = tmp_path / 'run', tmp_path / 'whole'
  _stop(directory, base, _KILL)
  code, _, err = call(train, *base, f'--output_dir={directory}')
  assert code == 0, err
  assert _rows(directory) == _FEWER
  if aggregation == 'dp':
    assert 'Privacy: epsilon' in err and _final_state(directory)
  else:
    assert call(train, *base, f'--output_dir={whole}')[0] == 0
    _assert_same_run(directory, whole, _FEWER)
    assert _client_states(directory) == _client_states(whole)


_SYSTEMS = {
    'frl': _FLAGS,
    'metavers': (
        '--algorithm=metavers',
        *_COMMON_FLAGS,
        '--hparams=shots=3,queries=3',
        '--num_new_clients=2',
        '--eval_every=7',
        '--validation_fraction=0.2',
        '--select_best',
    ),
    'cafeme': (
        '--algorithm=cafeme',
        *_COMMON_FLAGS[:2],
        *_COMMON_FLAGS[3:],
        '--model=modulated_mlp',
        '--preset=release',
        '--num_new_clients=2',
        '--clients_per_round=2',
        '--protocol=none',
    ),
    'fedec': (
        '--algorithm=fedec',
        *_COMMON_FLAGS,
        '--clients_per_round=3',
        '--eval_every=5',
        '--validation_fraction=0.2',
        '--select_best',
    ),
    'fedmeta_per': _STATEFUL_FLAGS,
}


@pytest.mark.slow
@pytest.mark.parametrize('system', _SYSTEMS)
def test_killed_anywhere_and_continued_is_the_whole_run(tmp_path, system):
  """Six kills each, 30 in all.

  What clients keep and the summary are those of the whole run, too.
  """
  base = _SYSTEMS[system]
  whole, directory = tmp_path / 'whole', tmp_path / 'run'
  _finish(whole, base)
  rng = random.Random(list(_SYSTEMS).index(system))
  for kill in range(6):
    process = _start(directory, base=base)
    # The first amid the start; each later one some rounds after the last.
    rows = rng.randint(9 * kill, 9 * kill + 8)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while _rows(directory) < rows and time.monotonic() < deadline:
      assert process.poll() is None, _log(directory)
      time.sleep(0.002)
    time.sleep(0.05 * rng.random() if rows else 8 * rng.random())
    process.kill()
    process.wait()
    print(f'{system}: killed after {_rows(directory)} rows, wanted {rows}')
  _finish(directory, base)

  _assert_same_run(directory, whole)
  if (whole / 'client_states.sqlite').exists():
    assert _client_states(directory) == _client_states(whole)
  summaries = [
      json.loads((d / 'summary.json').read_text()) for d in (directory, whole)
  ]
  for part in ('evaluation', 'evaluation_best', 'best_round'):
    assert summaries[0].get(part) == summaries[1].get(part)
  assert 'Traceback' not in _log(directory)


@pytest.mark.slow
def test_a_run_without_a_good_checkpoint_ends_and_loses_nothing(
    whole, tmp_path
):
  directory = tmp_path / 'run'
  (directory / 'checkpoints').mkdir(parents=True)
  for name in ('config.json', 'metrics.csv', 'timings.csv'):
    (directory / name).write_bytes((whole / name).read_bytes())
  damaged = directory / 'checkpoints' / f'round_{_ROUNDS:09d}.ckpt'
  damaged.write_bytes(b'nothing')
  before = mutations.state_of(directory)

  assert _start(directory).wait(_TIMEOUT_SECONDS) == 1

  lines = _log(directory).splitlines()[1:]
  assert lines[0].startswith(f'Checkpoint {damaged} cannot be used')
  assert lines[1].startswith('Error: Expected one of the 1 checkpoints')
  assert len(lines) == 2 and 'Nothing was changed. Tip: put the' in lines[1]
  after = mutations.state_of(directory)
  assert after.pop('.lock') == b''
  assert after == before

  damaged.unlink()  # As the tip says.
  _finish(directory)

  _assert_same_run(directory, whole)
  lines = _log(directory).splitlines()[4:]
  assert lines[0].startswith(f'Starting over: {directory} holds no checkpoint')
  multiple = f'an episode has 4 rounds, of which {_ROUNDS} is no multiple'
  assert multiple in lines[1]
  assert 'the last one ends after 2 of them' in lines[1]
  assert 'Starting over' not in _log(whole)


@pytest.mark.parametrize(
    'gone',
    [
        pytest.param('client_states.sqlite', marks=pytest.mark.ci),
        pytest.param('metrics.csv', marks=pytest.mark.slow),
        pytest.param('.', marks=pytest.mark.slow),
    ],
)
def test_what_goes_while_a_run_is_trained_ends_it(
    call, tmp_path, monkeypatch, gone
):
  directory = tmp_path / 'run'

  class Tracker:
    """Takes away what is to go, after a few rounds."""

    def append(self, round_num, values):
      del values
      if round_num == 4:
        (directory / gone).resolve().rename(tmp_path / 'elsewhere')

    def finish(self, round_num, values):
      pass

    def flush(self):
      pass

    def close(self):
      pass

  taking = trackers.Tracker(lambda run: Tracker())
  monkeypatch.setitem(trackers.TRACKERS, 'taking', taking)
  flags = (*_STATEFUL_FLAGS, f'--output_dir={directory}', '--track=taking')
  code, _, err = call(train, *flags)

  assert code == 1 and (tmp_path / 'elsewhere').exists()
  line = err.splitlines()[-1]
  assert line.startswith('Error: ') and str(directory) in line
