"""`tff_meta.fit`: what it trains, tests, adapts and saves."""

import collections
import os
import subprocess
import sys
from unittest import mock
import warnings

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from binaries import train  # noqa: F401  Defines the flags.
import tff_meta
from tff_meta import fitting
from tff_meta.models import model as model_lib
from tff_meta.training import run

_CLASSES = np.array(['ape', 'bee', 'cow'])


def _examples(seed, n=40):
  """Numbers near 0, 2 or 4 in the first place, and noise in the second."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, 3, n)
  x = rng.normal(0, 0.2, (n, 2)) + np.stack([2 * y, 0 * y], axis=1)
  return x.astype(np.float32), _CLASSES[y]


_CLIENTS = {f'c{k}': _examples(k) for k in range(5)}
_SETTINGS = dict(
    algorithm='fed_per',
    rounds=np.int64(6),
    clients_per_round=4,
    num_new_clients=1,
    hparams={'learning_rate': 0.3},
)


@pytest.fixture(scope='module')
def fitted():
  return tff_meta.fit(_CLIENTS, **_SETTINGS)


def test_the_settings_are_those_of_the_programs():
  from absl import flags

  other = dict(protocols=(), references=False)
  assert fitting._SETTINGS == other | {
      name: flags.FLAGS[name].default
      for name in fitting._SETTINGS
      if name not in other
  }


def test_what_is_trained_is_tested_and_saved(fitted, tmp_path):
  found = fitted.evaluate(references=True)
  assert list(found) == ['known_clients', 'new_clients']
  known = found['known_clients']
  assert known['num_clients'] == 4 and known['accuracy_mean'] > 0.8
  assert known['references']['untrained']['accuracy_mean'] < 0.8
  assert set(fitted.experiment.dataset.client_ids()) < set(_CLIENTS)
  saved = tff_meta.load(fitted.save(tmp_path / 'saved'))
  again = saved.evaluate('known_clients')['known_clients']
  assert again['accuracy_mean'] == known['accuracy_mean']
  with pytest.raises(FileExistsError, match='Expected a directory .*saved.$'):
    fitted.save(tmp_path / 'saved')
  (tmp_path / 'saved' / 'data.npz').rename(tmp_path / 'data.npz')
  elsewhere = tff_meta.load(tmp_path / 'saved', data_dir=tmp_path)
  assert elsewhere.experiment.dataset.client_ids()


def test_accuracy_is_measured_on_the_way(fitted):
  found = fitted.metrics()
  curve = found['known_clients/accuracy']
  assert len(curve) == 6 and curve[-1] > 0.8 and curve[-1] > curve[0]
  assert (fitted.path / 'learning_curve.png').exists()


def test_a_client_gets_a_model_of_its_own(fitted):
  x, y = _examples(9, 200)
  model = fitted.personalize((x[:100], y[:100]))
  assert (model.predict(x[100:]) == y[100:]).mean() > 0.8
  assert model.predict(x[:1]).shape == (1,) and set(model.predict(x)) == set(
      _CLASSES
  )
  assert model.predict(x[:0]).shape == (0,)
  # A known client begins with its own head, trained already.
  known = fitted.experiment.dataset.client_ids()[0]
  own = fitted.personalize((x[:1], y[:1]), client=known)
  assert (own.predict(x) == y).mean() > 0.8


@pytest.mark.parametrize('algorithm, warns', [('fed_avg', 1), ('fed_bn', 0)])
def test_of_few_examples_a_network_warns_that_normalises_a_call(
    algorithm, warns, capfd
):
  """So does conv4, which images train; clients of FedBN have statistics."""
  rng = np.random.default_rng(0)
  clients = {
      f'c{k}': (rng.integers(0, 256, (12, 8, 8)).astype(np.uint8), [0, 1] * 6)
      for k in range(3)
  }
  fitted = tff_meta.fit(clients, algorithm=algorithm, rounds=1, eval_every=0)
  err = capfd.readouterr().err
  assert err.count('Note: the network normalises examples') == warns
  model = fitted.personalize(clients['c0'])
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    for num in (0, 9, 10):
      model.predict(clients['c0'][0][:num])
  messages = [str(of.message) for of in caught if 'Expected' in str(of.message)]
  assert len(messages) == warns
  assert all('10 examples, found 9: the network' in text for text in messages)


@pytest.mark.parametrize(
    'examples, client, problem',
    [
        ((_examples(9)[0], ['owl'] * 40), None, "bee, cow, found 'owl'"),
        (
            (_examples(9)[0][:, :1], ['ape'] * 40),
            None,
            r'\(2,\), as in training, .*\(1,\)',
        ),
        ((np.zeros((3, 2), np.uint8), ['ape'] * 3), None, 'float32 .* uint8'),
        ((_examples(9)[0], ['ape'] * 3), None, 'found 3 of 40'),
        ((_examples(9)[0][:0], []), None, 'Expected examples, .*found 0 of 0'),
        ((_examples(9)[0], [['ape'] * 2] * 40), None, r'found \(40, 2\)'),
        (_examples(9), 'c9', "of training, such as 'c.', found 'c9'"),
    ],
)
def test_what_does_not_fit_is_refused(fitted, examples, client, problem):
  with pytest.raises(ValueError, match=problem):
    fitted.personalize(examples, client=client)


@pytest.mark.parametrize(
    'classes',
    [
        np.array(['07', '10', '9']),
        np.array([7, 10, -1], object),
        np.array([[7], [10], [9]], np.uint8),
        np.array([0.0, 1.0, 2.0], np.float32),
        np.array([True, False, True]),
    ],
)
def test_labels_are_as_they_were_given(classes, tmp_path):
  numbers = {name: i for i, name in enumerate(_CLASSES)}
  clients = {
      client: (x, classes[[numbers[name] for name in y]])
      for client, (x, y) in _CLIENTS.items()
  }
  fitted = tff_meta.fit(clients, **_SETTINGS | dict(rounds=1, eval_every=0))
  saved = tff_meta.load(fitted.save(tmp_path / 'saved'))
  (saved.path / 'data.npz').rename(tmp_path / 'data.npz')
  for model in fitted, tff_meta.load(saved.path, data_dir=tmp_path):
    x, y = clients['c0']
    found = model.personalize((x, y)).predict(x)
    kinds = [{type(c) for c in of.reshape(-1).tolist()} for of in (found, y)]
    assert kinds[0] == kinds[1]
    assert (found == y.reshape(-1)).mean() > 0.5


@pytest.mark.parametrize(
    'clients, settings, problem',
    [
        ([1], {}, 'a mapping from a name to .* found a list'),
        ({'a': 1}, {}, "x, y. of client 'a', found a int"),
        ({'a': ([1], [])}, {}, "examples, found none of 'a'"),
        ({'a': ([1.0], [0]), 'b': ([[1.0]], [0])}, {}, 'one shape and dtype'),
        (
            {'a': ([1.0], [0]), 'b': ([np.nan], [0])},
            {},
            "client 'b', found others",
        ),
        ({'a': ([1.0], ['b']), 'c': ([1.0], [None])}, {}, "'c', found None"),
        ({'a': ([1.0, 2.0], ['b', np.nan])}, {}, "of client 'a', found nan"),
        ({'a': ([1.0, 2.0], ['b', ''])}, {}, "of client 'a', found ''"),
        ({1: ([1.0], [0]), '1': ([1.0], [0])}, {}, "text, found 1 and '1'"),
        ({'a': ([[1.0], [1.0, 2.0]], [0, 1])}, {}, "`x` of client 'a' to be o"),
        ({'a': (np.array([1, 'b'], object), [0, 1])}, {}, "'a', found object"),
        ({'a': (['b', 'c'], [0, 1])}, {}, "in `x` of client 'a', found <U1"),
        ({'a': ([1.0, 2.0], [0, 1j])}, {}, "in `y` of client 'a', found compl"),
        ({'a': ([1.0, 2.0], np.array([b'b', b'c']))}, {}, r"'a', found \|S1"),
        (
            {'a': (np.zeros(30), np.arange(30))},
            {},
            'in `clients`, found 30 .* Tip: `y` is int64; quantities',
        ),
        (
            {'a': ([1.0] * 4, [0.0, 1, 0, 1]), 'b': ([1.0] * 2, [1, 2.5])},
            {},
            "or names, found 2.5 of client 'b'. Tip: `y` is float64; quant",
        ),
        ({'a': ([1e300, 1.0], [0, 1])}, {}, 'of float32 in `clients`'),
        (_CLIENTS, dict(dataset_options='label=x'), "no option `label`.*'x'"),
        (
            _CLIENTS,
            dict(num_new_clients=9),
            'at least 10 clients, found 5 clients in them. Asked for were'
            ' `num_clients` 1 and `num_new_clients` 9',
        ),
        (
            'digits',
            dict(num_clients=5000),
            '10010 examples for 5005 clients, one for each shard, found 14.*'
            ' `num_clients` 5000 and `num_new_clients` 5',
        ),
        (_CLIENTS, dict(round=3), "found 'round'. Tip: .* mean 'rounds'"),
        (_CLIENTS, dict(num_new_client=3), "mean 'num_new_clients'"),
        (
            _CLIENTS,
            dict(epochs=3, algorithm='fed_avg'),
            "'epochs' of fed_avg in `hparams`, .* Tip: `hparams={'epochs': 3}`",
        ),
        (_CLIENTS, dict(wrong=3), 'settings of (?!.*dataset,|.*execution)'),
        (_CLIENTS, dict(hparams={'wrong': 3}), 'an option of metavers, found'),
        (_CLIENTS, dict(rounds=2, eval_every=1, eval_from=3), 'eval_from=0`.'),
        (_CLIENTS, dict(dataset_options={'scalling': 1}), "mean 'scaling'"),
        (_CLIENTS, dict(dataset_options='client=x'), '`client` once, found it'),
        (_CLIENTS, dict(plugins='gone'), "'gone' of `plugins` of `fit`, found"),
        (_CLIENTS, dict(dataset='digits'), 'found `dataset` as well'),
        (_CLIENTS, dict(data_dir='.'), 'found `data_dir` as well'),
        ('digits', dict(dataset='digits'), 'found `dataset` as well'),
        ('digits', dict(execution='native'), 'Expected no `execution`'),
        ('digits', dict(batched_clients=2), 'no `batched_clients`'),
        (_CLIENTS, dict(rounds=2.5), '`rounds` .* whole number, found 2.5'),
        (_CLIENTS, dict(shards=2.5), '`shards` .* number or None, found 2.5'),
        (_CLIENTS, dict(hparams=3), '`hparams` to be text, found 3'),
        (_CLIENTS, dict(rounds=0), '`rounds` to be at least 1 .*found 0'),
        (_CLIENTS, dict(algorithm=None), '`algorithm` to be text, found None'),
        (_CLIENTS, dict(algorithm='fedper'), "mean 'fed_per'"),
        ('digit', {}, "mean 'digits'"),
        (os.path.dirname(__file__), {}, "own are `clients='folder:/.*/tests'`"),
        (_CLIENTS, dict(way=3), "no sizes of groups, as 'metavers'.* way 3"),
        (
            'digit_pairs',
            dict(algorithm='frl', protocols='new_groups', nvar=True),
            'to be evaluated with `nvar`, found new_groups',
        ),
        (
            'digit_pairs',
            dict(
                algorithm='frl',
                protocols='new_groups',
                eval_support_fraction=0.5,
                eval_every=0,
            ),
            'to be tested with `eval_support_fraction`, found new_groups',
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, clients, settings, problem):
  with pytest.raises((TypeError, ValueError), match=problem):
    tff_meta.fit(clients, output_dir=tmp_path / 'run', **settings)
  assert not list(tmp_path.iterdir())


def _client_data(prepare):
  """Returns the clients as TFF has them, made of data sets of (x, y)."""
  clients = tff.simulation.datasets.TestClientData(
      {
          name: collections.OrderedDict(x=x, y=y)
          for name, (x, y) in _CLIENTS.items()
      }
  )
  pairs = clients.preprocess(lambda ds: ds.map(lambda e: (e['x'], e['y'])))
  return pairs.preprocess(prepare)


@pytest.mark.parametrize(
    'prepare',
    [
        lambda ds: ds,
        lambda ds: ds.map(lambda x, y: {'label': y, 'pixels': x}),
        lambda ds: ds.map(lambda x, y: {'y': y, 'x': x}),
    ],
)
def test_clients_of_tff_are_taken_as_they_are(prepare):
  found = fitting._to_arrays(_client_data(prepare))
  for name, expected in fitting._to_arrays(_CLIENTS).items():
    np.testing.assert_array_equal(found[name], expected, strict=True)


@pytest.mark.parametrize(
    'prepare, problem',
    [
        (
            lambda ds: ds.map(lambda x, y: {'label': y, 'a': x, 'b': x}),
            "the features .'a', 'b', 'label'.",
        ),
        (
            lambda ds: ds.map(lambda x, y: {'kind': y, 'x': x}),
            'label, labels or',
        ),
        (lambda ds: ds.map(lambda x, y: x), 'or of .x, y., found a TensorSpec'),
        (lambda ds: ds.batch(8), 'one example an element of .*None'),
        (lambda ds: ds.take(0), "to have examples, found none of 'c0'"),
        (lambda ds: ds.repeat(), "client 'c0' .*without end"),
    ],
)
def test_what_is_wrong_with_clients_of_tff_is_named(prepare, problem):
  with pytest.raises(ValueError, match=problem):
    fitting._to_arrays(_client_data(prepare))


def test_what_is_saved_does_not_tell_who_took_part(tmp_path, capfd):
  """A private run, which goes on with others."""
  settings = _SETTINGS | dict(
      aggregation='dp', aggregation_options='noise_multiplier=20', rounds=2
  )
  settings |= dict(clients_per_round=2, output_dir=tmp_path / 'run')
  fitted = tff_meta.fit(_CLIENTS, **settings)
  saved = tff_meta.load(fitted.save(tmp_path / 'saved'))
  lost = {path.name for path in fitted.path.iterdir()} - {
      path.name for path in saved.path.iterdir()
  }
  assert lost == {'cohorts.secret'}
  known = saved.experiment.dataset.client_ids()[0]
  for client in (None, known):
    labels = [
        model.personalize(_examples(8), client).predict(_examples(9)[0])
        for model in (fitted, saved)
    ]
    np.testing.assert_array_equal(*labels)
  settings |= dict(rounds=3, output_dir=saved.path)
  tff_meta.fit(_CLIENTS, **settings)
  assert 'cohorts.secret is not there any more' in capfd.readouterr().err


def test_another_run_in_its_directory_stays_as_it_is(fitted, tmp_path):
  saved = fitted.save(tmp_path / 'saved')
  before = {p: p.read_bytes() for p in saved.rglob('*') if p.is_file()}
  others = _CLIENTS | {'c0': _examples(8)}
  with pytest.raises(ValueError, match='to hold these examples, found others'):
    tff_meta.fit(others, output_dir=saved, **_SETTINGS)
  others = {name: (x.astype(float), y) for name, (x, y) in _CLIENTS.items()}
  with pytest.raises(ValueError, match='or such of another dtype, in'):
    tff_meta.fit(others, output_dir=saved, **_SETTINGS)
  assert before == {p: p.read_bytes() for p in before}
  again = tff_meta.fit(_CLIENTS, output_dir=saved, **_SETTINGS)
  other = tmp_path / 'other'
  other.mkdir()
  (other / 'data.npz').write_text('of another program')
  with pytest.raises(ValueError, match='something else than arrays in .*data.'):
    tff_meta.fit(_CLIENTS, output_dir=other, **_SETTINGS)
  assert again.evaluate('new_clients') == fitted.evaluate('new_clients')


def test_a_run_is_not_written_among_files_of_the_user(tmp_path):
  photos = tmp_path / 'photos'
  for path in (photos / f'c{k}/{c}/1.png' for k in '01' for c in 'ab'):
    path.parent.mkdir(parents=True)
    image = np.zeros((4, 4, 3), np.uint8)
    tf.io.write_file(str(path), tf.io.encode_png(image))
  before = sorted(tmp_path.rglob('*'))
  for clients, output_dir, problem in (
      (_CLIENTS, photos, 'to hold a run, found c0. Tip: .* `output_dir`'),
      (f'folder:{photos}', photos, 'outside of .*photos, which'),
      (f'folder:{photos}', photos / 'run', 'found .*run. Tip: give another'),
  ):
    with pytest.raises(OSError, match=problem):
      tff_meta.fit(clients, output_dir=output_dir, num_new_clients=0)
  assert sorted(tmp_path.rglob('*')) == before


def test_files_that_are_gone_are_not_named(monkeypatch):
  why = 'In none of 2 rounds has a client trained'
  monkeypatch.setattr('tff_meta.training.run.nothing_learned', lambda _: why)
  learned = 'tff_meta.training.run.train_and_evaluate'
  problem = run.NothingLearnedError(f'{why}; the checkpoints are in /tmp.')
  monkeypatch.setattr(learned, mock.Mock(side_effect=problem))
  with pytest.raises(run.NothingLearnedError) as found:
    tff_meta.fit(_CLIENTS)
  assert str(found.value) == f'{why}. Nothing was learned.'


def test_a_network_is_given_as_it_is(tmp_path):
  keras_model = tf.keras.Sequential(
      [tf.keras.Input((2,)), tf.keras.layers.Dense(4), tf.keras.layers.Dense(3)]
  )
  settings = _SETTINGS | dict(rounds=1)
  fitted = tff_meta.fit(_CLIENTS, model=keras_model, **settings)
  network = fitted.experiment.model
  assert isinstance(network, model_lib.Model) and network.embedding_size == 4
  saved = fitted.save(tmp_path / 'saved')
  with pytest.raises(ValueError, match="found only its name, 'given'"):
    tff_meta.load(saved)
  again = tff_meta.load(saved, model=keras_model)
  assert again.experiment.config == fitted.experiment.config.replace(
      data_dir=str(saved)
  )


def test_what_is_of_no_use_is_told_before_training(monkeypatch, capfd):
  def trained(*args, **kwargs):
    raise KeyboardInterrupt

  monkeypatch.setattr('tff_meta.training.run.train_and_evaluate', trained)
  with pytest.raises(KeyboardInterrupt):
    tff_meta.fit(_CLIENTS, 'frl')
  shown = capfd.readouterr().err
  assert 'Note: nothing will be evaluated: frl has no use for ' in shown
  assert '(`fit` takes npz:PATH instead of a mapping)' in shown
  with pytest.raises(KeyboardInterrupt):
    tff_meta.fit(_CLIENTS, 'fed_avg', hparams={'fine_tuning_steps': 5})
  assert 'fine_tuning_steps has no effect: fed_avg' in capfd.readouterr().err
  monkeypatch.setattr('tff_meta.training.run.train_and_evaluate', mock.Mock())
  fitted = tff_meta.fit(_CLIENTS, 'frl')
  with pytest.raises(ValueError, match='found nobody: frl has no use for'):
    fitted.evaluate()


@pytest.mark.parametrize(
    'options', [{'scaling': 'standard'}, 'scaling=standard']
)
def test_examples_are_scaled_as_is_asked_for(monkeypatch, options):
  class PreparedError(Exception):
    pass

  def prepared(config, model):
    raise PreparedError(config.data.dataset_options)

  monkeypatch.setattr(fitting, '_prepare', prepared)
  with pytest.raises(PreparedError) as found:
    tff_meta.fit(_CLIENTS, dataset_options=options)
  (given,) = found.value.args
  assert (given['scaling'], given['client']) == ('standard', 'client')


def test_to_import_the_package_is_cheap_still():
  code = (
      'import sys, tff_meta; assert "tensorflow" not in sys.modules;'
      ' tff_meta.fit; assert "tensorflow" not in sys.modules'
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True)
  assert done.returncode == 0, done.stderr
  with pytest.raises(AttributeError, match="no attribute 'fitt'"):
    tff_meta.fitt  # noqa: B018
