"""Bundles of trained systems answer as evaluation does."""

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


def _of_clients(experiment, model):
  """Returns what known clients are given in evaluation, and their labels."""
  protocol = protocols.protocols_of(experiment)['known_clients']
  tasks = list(protocol.draw.tasks(experiment.dataset))[:_MANY]
  memories = [model.memories.of(task.client_id) for task in tasks]
  answers = client_evaluation.ask_clients(
      client_evaluation.build_client_test(experiment.method.known_client()),
      model.weights,
      memories,
      tasks,
      seed=protocol.draw.seed,
  )
  given = [
      dict(
          support_x=task.support.x,
          support_y=task.support.y,
          query_x=task.query.x,
          seed=np.array([protocol.draw.seed, task.salt], np.int32),
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
  labels = test(model.weights, together, seeds).numpy()
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
  return given, labels


def _raw(bundle, x):
  """Returns the pixels that the network has as `x`."""
  scaling = np.load(bundle / serve.SCALING)
  return np.rint((x - scaling['offset']) / scaling['slope']).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    'algorithm, use',
    [
        ('frl', 'group'),
        ('metavers', 'known_client'),
        ('cafeme', 'known_client'),
        ('fedec', 'known_client'),
        ('fedmeta_per', 'known_client'),
    ],
)
def test_served_labels_are_those_of_evaluation(algorithm, use, tmp_path):
  is_of_groups = use == 'group'
  fitted = tff_meta.fit(
      'digit_pairs' if is_of_groups else 'digits',
      algorithm,
      rounds=4,
      protocols=('none',),
      num_clients=32 if is_of_groups else _MANY,
  )
  bundle = fitted.export(
      tmp_path / 'bundle', allow_private_heads=True, tflite=True
  )
  with restored_run.open_models(
      fitted.experiment, run_directory.RunDirectory(fitted.path), print
  ) as models:
    given, expected = (_of_groups if is_of_groups else _of_clients)(
        fitted.experiment, models.trained
    )
  assert len(given) == _MANY
  assert len(np.unique(np.concatenate(expected))) > 1
  for tflite in False, True:
    apart = asked = 0
    for arrays, labels in zip(given, expected, strict=True):
      raw = {
          name: _raw(bundle, arrays[name]) for name in arrays if '_x' in name
      }
      found = serve.predict(bundle, use, arrays | raw, tflite).astype(int)
      apart += np.sum(found != labels)
      asked += len(labels)
    print(f'{algorithm}, {tflite=}: {apart} of {asked} labels differ.')
    assert not apart
