"""Published class splits: sizes, disjointness, spot checks by name."""

import pytest

from tff_meta.data import class_splits

SIZES = {
    class_splits.ten_classes: (4, 3, 3),
    class_splits.frl_cifar100: (64, 16, 20),
    class_splits.metavers_cifar100: (64, 16, 20),
    class_splits.cifar_fs: (64, 16, 20),
    class_splits.fc100: (60, 20, 20),
}


@pytest.mark.parametrize('split_fn', SIZES, ids=lambda f: f.__name__)
def test_sizes_and_exhaustiveness(split_fn):
  split = split_fn()
  sizes = len(split.train), len(split.validation), len(split.test)
  assert sizes == SIZES[split_fn]
  labels = split.train + split.validation + split.test
  assert sorted(labels) == list(range(sum(SIZES[split_fn])))


def test_frl_and_metavers_test_on_different_cifar100_classes():
  assert class_splits.frl_cifar100().test == tuple(range(80, 100))
  assert class_splits.metavers_cifar100().test == tuple(range(64, 84))
  assert class_splits.metavers_cifar100().validation == tuple(range(84, 100))


def test_cifar100_names_are_numbered_alphabetically():
  names = class_splits.cifar100_class_names()
  assert len(set(names)) == 100
  # Labels of the published data set.
  assert (names[0], names[42], names[99]) == ('apple', 'leopard', 'worm')


def test_cifar_fs_and_fc100_by_name():
  names = class_splits.cifar100_class_names()
  cifar_fs, fc100 = class_splits.cifar_fs(), class_splits.fc100()
  assert {'whale', 'worm', 'fox'} < {names[i] for i in cifar_fs.test}
  assert {'sea', 'crab', 'maple_tree'} < {names[i] for i in cifar_fs.validation}
  assert {'baby', 'bee', 'skunk'} < {names[i] for i in fc100.test}
  for members in class_splits.CIFAR100_SUPERCLASSES.values():
    labels = {names.index(name) for name in members.split()}
    parts = [
        set(p) & labels for p in (fc100.train, fc100.validation, fc100.test)
    ]
    assert sorted(map(len, parts)) == [0, 0, 5]


def test_omniglot_splits_alphabets_whole_but_for_gurmukhi():
  names = ['Greek_3', 'Gurmukhi_40', 'Gurmukhi_41', 'ULOG_0', 'Hebrew_21']
  names += ['Syriac_(Serto)_2', 'Syriac_(Estrangelo)_2']
  split = class_splits.omniglot_vinyals(names)
  assert split.train == (0, 1, 6)
  assert split.validation == (4,)
  assert split.test == (2, 3, 5)


def test_omniglot_refuses_names_without_number():
  with pytest.raises(ValueError, match="found 'Greek' for label 1"):
    class_splits.omniglot_vinyals(['Greek_1', 'Greek'])
