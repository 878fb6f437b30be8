"""The list of data sets."""

import dataclasses
import subprocess
import sys

import pytest

from tff_meta import datasets
from tff_meta import models
from tff_meta.data import class_splits
from tff_meta.datasets import digits


def test_names():
  assert list(datasets.DATASETS) == [
      'digits',
      'digit_pairs',
      'synthetic',
      'mnist',
      'cifar10',
      'cifar100',
      'omniglot',
      'femnist',
      'cinic10',
      'mini_imagenet',
      'meta_dataset',
  ]


def test_importing_the_list_imports_no_large_library():
  program = (
      'import sys; from tff_meta import datasets;'
      ' print([m for m in ("tensorflow", "tensorflow_datasets", "sklearn",'
      ' "tensorflow_federated", "PIL") if m in sys.modules])'
  )
  result = subprocess.run(
      [sys.executable, '-c', program],
      capture_output=True,
      text=True,
      check=True,
  )
  assert result.stdout.strip() == '[]'


def test_load_corpus_passes_options_on():
  corpus = datasets.load_corpus('digits', scaling='raw')
  assert corpus.preprocess(corpus.train.x).max() == 16
  assert corpus.fingerprint() == digits.load(scaling='raw').fingerprint()
  assert corpus.fingerprint() != digits.load().fingerprint()


def test_a_data_set_that_loads_none_is_named(monkeypatch):
  nothing = dataclasses.replace(datasets.get('digits'), load=lambda *_: None)
  monkeypatch.setitem(datasets.DATASETS, 'nothing', nothing)
  with pytest.raises(TypeError, match="the data set 'nothing' .*found None"):
    datasets.load_corpus('nothing')


def test_unknown_data_set_lists_the_known_ones():
  with pytest.raises(ValueError, match="digits, .* meta_dataset, found 'x'"):
    datasets.load_corpus('x')


def test_unknown_option_lists_the_known_ones():
  with pytest.raises(
      ValueError, match="'cifar100' .* class_split, found 'way'"
  ):
    datasets.load_corpus('cifar100', way=5)


@pytest.mark.parametrize(
    'spec', datasets.DATASETS.values(), ids=lambda s: s.name
)
def test_default_model_is_registered(spec):
  assert spec.default_model in models.MODELS


def _class_split(name):
  """Returns the split that a data set's `load` gives it, without the data."""
  return {
      'digits': class_splits.ten_classes,
      'digit_pairs': lambda: datasets.load_corpus('digit_pairs').class_split,
      'synthetic': lambda: datasets.load_corpus('synthetic').class_split,
      'mnist': class_splits.ten_classes,
      'cifar10': class_splits.ten_classes,
      'cifar100': class_splits.frl_cifar100,
      'mini_imagenet': lambda: class_splits.consecutive(64, 16, 20),
  }[name]()


@pytest.mark.parametrize(
    'name',
    [
        'digits',
        'digit_pairs',
        'synthetic',
        'mnist',
        'cifar10',
        'cifar100',
        'mini_imagenet',
    ],
)
def test_default_sizes_suit_the_class_split(name):
  few_round = datasets.get(name).few_round
  split = _class_split(name)
  assert few_round.way <= len(split.test)
  # Every class is cut into a whole number of shards, at preparation and at
  # deployment.
  assert 2 * few_round.num_clients % len(split.train) == 0
  assert 2 * few_round.cohort_size % few_round.way == 0
  assert few_round.cohort_size <= few_round.num_clients


def test_default_sizes_of_frl():
  """Park et al., section 4: 128 shards of 300; four shards of 150."""
  cifar100 = datasets.get('cifar100').few_round
  assert 64 * cifar100.examples_per_class / (2 * cifar100.num_clients) == 300
  femnist = datasets.get('femnist').few_round
  assert 52 * femnist.examples_per_class / (2 * femnist.num_clients) == 300
  omniglot = datasets.get('omniglot').few_round
  assert 1028 * omniglot.examples_per_class / (2 * omniglot.num_clients) == 10
  for sizes in (cifar100, femnist, omniglot):
    assert 2 * sizes.cohort_size / sizes.way == 4
