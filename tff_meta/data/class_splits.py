"""Published splits of classes into meta-train, meta-validation, meta-test.

A split names the classes of a corpus by label. Where the labels are not in an
obvious order (Omniglot) the split is worked out from the names of the labels.
"""

from collections.abc import Sequence

from tff_meta.data import corpus as corpus_lib

# With fewer, a part of a split of data of one's own would have less than two.
LEAST_CLASSES = 8

# CIFAR-100: superclass -> its five classes. Fine labels are numbered in the
# alphabetical order of their names.
CIFAR100_SUPERCLASSES = {
    'aquatic_mammals': 'beaver dolphin otter seal whale',
    'fish': 'aquarium_fish flatfish ray shark trout',
    'flowers': 'orchid poppy rose sunflower tulip',
    'food_containers': 'bottle bowl can cup plate',
    'fruit_and_vegetables': 'apple mushroom orange pear sweet_pepper',
    'household_electrical_devices': 'clock keyboard lamp telephone television',
    'household_furniture': 'bed chair couch table wardrobe',
    'insects': 'bee beetle butterfly caterpillar cockroach',
    'large_carnivores': 'bear leopard lion tiger wolf',
    'large_man-made_outdoor_things': 'bridge castle house road skyscraper',
    'large_natural_outdoor_scenes': 'cloud forest mountain plain sea',
    'large_omnivores_and_herbivores': (
        'camel cattle chimpanzee elephant kangaroo'
    ),
    'medium_mammals': 'fox porcupine possum raccoon skunk',
    'non-insect_invertebrates': 'crab lobster snail spider worm',
    'people': 'baby boy girl man woman',
    'reptiles': 'crocodile dinosaur lizard snake turtle',
    'small_mammals': 'hamster mouse rabbit shrew squirrel',
    'trees': 'maple_tree oak_tree palm_tree pine_tree willow_tree',
    'vehicles_1': 'bicycle bus motorcycle pickup_truck train',
    'vehicles_2': 'lawn_mower rocket streetcar tank tractor',
}

_CIFAR_FS_VALIDATION = (
    'beaver beetle butterfly camel cattle crab crocodile flatfish lamp'
    ' maple_tree motorcycle otter sea shark television tractor'
)
_CIFAR_FS_TEST = (
    'baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy'
    ' rocket rose snail sweet_pepper table telephone wardrobe whale woman worm'
)

_FC100_VALIDATION = (
    'large_carnivores',
    'large_omnivores_and_herbivores',
    'non-insect_invertebrates',
    'small_mammals',
)
_FC100_TEST = ('aquatic_mammals', 'insects', 'medium_mammals', 'people')

# Omniglot, Vinyals' split: whole alphabets, but for Gurmukhi, whose first 41
# characters belong to meta-train and whose last four belong to meta-test.
_OMNIGLOT_VALIDATION = (
    'Armenian',
    'Bengali',
    'Early_Aramaic',
    'Hebrew',
    'Mkhedruli_(Georgian)',
)
_OMNIGLOT_TEST = (
    'Kannada',
    'Keble',
    'Malayalam',
    'Manipuri',
    'Mongolian',
    'Old_Church_Slavonic_(Cyrillic)',
    'Oriya',
    'Sylheti',
    'Syriac_(Serto)',
    'Tengwar',
    'Tibetan',
    'ULOG',
)
_GURMUKHI_TRAIN_CHARACTERS = 41


def consecutive(
    num_train: int, num_validation: int, num_test: int
) -> corpus_lib.ClassSplit:
  """Returns the first classes as train, the next as validation, then test."""
  bounds = (num_train, num_train + num_validation)
  return corpus_lib.ClassSplit(
      tuple(range(bounds[0])),
      tuple(range(*bounds)),
      tuple(range(bounds[1], bounds[1] + num_test)),
  )


def ten_classes() -> corpus_lib.ClassSplit:
  """Ten classes, 0-3 / 4-6 / 7-9: enough for groups of up to three ways.

  Source: ours; nobody published a split of ten classes for few-round learning.
  """
  return consecutive(4, 3, 3)


def frl_cifar100() -> corpus_lib.ClassSplit:
  """CIFAR-100, fine labels 0-63 / 64-79 / 80-99.

  Source: Park et al., Few-Round Learning for Federated Learning, NeurIPS 2021
    (64/16/20 classes); which labels: the authors' released code.
  """
  return consecutive(64, 16, 20)


def metavers_cifar100() -> corpus_lib.ClassSplit:
  """CIFAR-100, fine labels 0-63 train, 84-99 validation, 64-83 test.

  Source: Lim et al., MetaVers, Table 6 (64/16/20 classes); which labels: the
    authors' released code. FRL's code tests on 80-99 instead.
  """
  return corpus_lib.ClassSplit(
      tuple(range(64)), tuple(range(84, 100)), tuple(range(64, 84))
  )


def cifar_fs() -> corpus_lib.ClassSplit:
  """CIFAR-FS: 64/16/20 classes of CIFAR-100, chosen at random by its authors.

  Source: Bertinetto et al., Meta-learning with differentiable closed-form
    solvers, ICLR 2019.
  """
  labels = {name: i for i, name in enumerate(cifar100_class_names())}
  validation = {labels[name] for name in _CIFAR_FS_VALIDATION.split()}
  test = {labels[name] for name in _CIFAR_FS_TEST.split()}
  return _split_by_membership(len(labels), validation, test)


def fc100() -> corpus_lib.ClassSplit:
  """FC100: 60/20/20 classes of CIFAR-100, whole superclasses in one part.

  Source: Oreshkin et al., TADAM, NeurIPS 2018.
  """
  labels = {name: i for i, name in enumerate(cifar100_class_names())}

  def members(superclasses):
    return {
        labels[name]
        for superclass in superclasses
        for name in CIFAR100_SUPERCLASSES[superclass].split()
    }

  return _split_by_membership(
      len(labels), members(_FC100_VALIDATION), members(_FC100_TEST)
  )


def cifar100_class_names() -> list[str]:
  """Returns the names of CIFAR-100's fine labels 0..99."""
  classes = ' '.join(CIFAR100_SUPERCLASSES.values()).split()
  return sorted(classes)


def omniglot_vinyals(label_names: Sequence[str]) -> corpus_lib.ClassSplit:
  """Omniglot: 1,028 / 172 / 423 characters.

  Args:
    label_names: Name of every label, '<alphabet>_<number>', the number being
      the character's place in its alphabet counted from 0 (as TensorFlow
      Datasets names the labels of `omniglot`).

  Returns:
    The split, in labels 0..len(label_names)-1.

  Raises:
    ValueError: If a name does not end in '_<number>'.

  Source: Vinyals et al., Matching Networks for One Shot Learning, NeurIPS 2016;
    the list in circulation is that of Snell et al.'s prototypical networks.
  """
  validation, test = set(), set()
  for label, name in enumerate(label_names):
    alphabet, _, number = name.rpartition('_')
    if not alphabet or not number.isdigit():
      raise ValueError(
          'Expected `label_names` to look like "Greek_3", found'
          f' {name!r} for label {label}.'
      )
    if alphabet in _OMNIGLOT_VALIDATION:
      validation.add(label)
    elif alphabet in _OMNIGLOT_TEST:
      test.add(label)
    elif alphabet == 'Gurmukhi' and int(number) >= _GURMUKHI_TRAIN_CHARACTERS:
      test.add(label)
  return _split_by_membership(len(label_names), validation, test)


def _split_by_membership(num_classes, validation, test):
  train = set(range(num_classes)) - validation - test
  return corpus_lib.ClassSplit(
      tuple(sorted(train)), tuple(sorted(validation)), tuple(sorted(test))
  )
