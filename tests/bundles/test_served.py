"""Bundles of trained systems answer as evaluation does."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import tff_meta
from tff_meta.bundles import serve
from tff_meta.evaluation import clients as client_evaluation
from tff_meta.evaluation import groups as group_evaluation
from tff_meta.training import protocols
from tff_meta.training import restored_run
from tff_meta.training import run_directory

_MANY = 20


_PROTOCOLS = {
    'known_client': 'known_clients',
    'new_client': 'new_clients',
    'new_class': 'new_class_clients',
}


def _of_clients(experiment, model, use):
  """Returns what clients are given in evaluation, and their labels."""
  draw = protocols.protocols_of(experiment)[_PROTOCOLS[use]].draw
  if use == 'new_class':
    found = client_evaluation.new_class_tasks(
        experiment.dataset.class_pools, draw
    )
  else:
    found = draw.tasks(experiment.dataset)
  tasks = list(itertools.islice(found, _MANY))
  method = experiment.group_method if use == 'new_class' else experiment.method
  personalizer = getattr(method, use)()
  memories = [
      model.memories.of(task.client_id) if use == 'known_client' else ()
      for task in tasks
  ]
  answers = client_evaluation.ask_clients(
      client_evaluation.build_client_test(personalizer),
      model.weights,
      memories,
      tasks,
      seed=draw.seed,
      bank=model.memories.bank if personalizer.uses_bank else (),
  )
  given = [
      dict(
          support_x=task.support.x,
          support_y=task.support.y,
          query_x=task.query.x,
          seed=np.array([draw.seed, task.salt], np.int32),
      )
      | {
          f'memory_{i}': np.asarray(leaf)
          for i, leaf in enumerate(tf.nest.flatten(memory))
      }
      for task, memory in zip(tasks, memories, strict=True)
  ]
  return given, [answer.after for answer in answers]


def _of_groups(experiment, model):
  """Returns what new groups are given in evaluation, and their labels."""
  draw = protocols.protocols_of(experiment)['new_groups_iid'].draw
  groups = [
      draw.sample(experiment.dataset.class_pools, index)
      for index in range(_MANY)
  ]
  seeds = np.array([[draw.seed, index] for index in range(_MANY)], np.int32)
  together = tf.nest.map_structure(
      lambda *leaves: tf.constant(np.stack(leaves)),
      *(group._replace(classes=()) for group in groups),
  )
  test = group_evaluation.build_group_test(experiment.group_method.group())
  labels, _ = test(model.weights, together, seeds)
  given = [
      dict(
          support_x=group.support_x,
          support_y=group.support_y,
          support_mask=group.support_mask,
          query_x=group.query_x,
          salts=group.salts,
          seed=seed,
      )
      for group, seed in zip(groups, seeds, strict=True)
  ]
  return given, labels.numpy()


def _raw(bundle, x):
  """Returns the pixels that the network has as `x`."""
  scaling = np.load(bundle / serve.SCALING)
  return np.rint((x - scaling['offset']) / scaling['slope']).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    'algorithm, dataset, uses',
    [
        ('frl', 'digit_pairs', ['group']),
        ('metavers', 'digit_pairs', ['new_class']),
        ('metavers', 'digits', ['known_client', 'new_client']),
        ('cafeme', 'digits', ['known_client', 'new_client']),
        ('fedec', 'digits', ['known_client', 'new_client']),
        ('fedmeta_per', 'digits', ['known_client', 'new_client']),
    ],
)
def test_served_labels_are_those_of_evaluation(
    algorithm, dataset, uses, tmp_path
):
  """Of twenty clients or groups, also in TensorFlow Lite's interpreter."""
  settings = dict(num_clients=32, partition='few_round')
  if dataset == 'digits':
    settings = dict(num_clients=_MANY, num_new_clients=_MANY)
  fitted = tff_meta.fit(
      dataset, algorithm, rounds=4, protocols=('none',), **settings
  )
  bundle = fitted.export(
      tmp_path / 'bundle', allow_private_heads=True, tflite=True
  )
  directory = run_directory.RunDirectory(fitted.path)
  with restored_run.open_models(fitted.experiment, directory, print) as models:
    trained = models.trained
    asked = {
        use: _of_groups(fitted.experiment, trained)
        if use == 'group'
        else _of_clients(fitted.experiment, trained, use)
        for use in uses
    }
  for use, (given, expected) in asked.items():
    assert len(given) == _MANY
    assert len(np.unique(np.concatenate(expected))) > 1
    for tflite in False, True:
      apart = sum(
          _num_apart(bundle, use, tflite, *of_one)
          for of_one in zip(given, expected, strict=True)
      )
      print(f'{algorithm}, {use}, {tflite=}: {apart} labels differ.')
      assert not apart


def _num_apart(bundle, use, tflite, arrays, labels):
  """Returns how many served labels are others."""
  raw = {name: _raw(bundle, arrays[name]) for name in arrays if '_x' in name}
  found = serve.predict(bundle, use, arrays | raw, tflite).astype(int)
  return np.sum(found != labels)
