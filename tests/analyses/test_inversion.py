"""Gradient inversion: the objective, its derivative, and what leaks."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import datasets
from tff_meta.analyses import inversion
from tff_meta.analyses import smooth_lenet

SHAPE = (4, 4, 1)
MODEL = smooth_lenet.build_smooth_lenet(SHAPE)


@pytest.fixture(scope='module')
def scene():
  rng = np.random.default_rng(1)
  return inversion.Scene(
      image=rng.uniform(size=SHAPE),
      label=2,
      num_classes=3,
      support=rng.uniform(size=(2, 5, *SHAPE)),
      local_label=1,
  )


@pytest.fixture(scope='module')
def victims(scene):
  return inversion.build_victims(MODEL, scene, seed=0)


def truth(attack, victim, scene, prototypes):
  """The unknowns of the victim itself; a label as sure as float64 allows."""
  label = np.full(victim.num_classes, -60.0)
  label[victim.label] = 60.0
  parts = [scene.image.ravel(), label]
  if victim.hidden_prototypes is not None:
    parts.append(prototypes.ravel())
  unknowns = np.concatenate(parts)
  assert len(unknowns) == attack.num_unknowns
  return unknowns


@pytest.mark.parametrize(
    'case',
    [
        inversion.CLASSIFIER,
        inversion.HIDDEN_PROTOTYPES,
        inversion.LEAKED_PROTOTYPES,
    ],
)
def test_the_victim_itself_matches_and_the_derivative_is_right(
    victims, scene, case
):
  victim = victims[case]
  leaked = victims[inversion.LEAKED_PROTOTYPES].prototypes.numpy()
  attack = inversion.Attack(victim, SHAPE)
  exact, slope = attack(truth(attack, victim, scene, leaked))
  assert exact < 1e-25
  assert np.abs(slope).max() < 1e-10

  rng = np.random.default_rng(3)
  point = rng.standard_normal(attack.num_unknowns)
  value, gradient = attack(point)
  assert value > 1e-3
  for _ in range(3):
    way = rng.standard_normal(len(point))
    way *= 1e-4 / np.linalg.norm(way)
    rise = attack(point + way)[0] - attack(point - way)[0]
    np.testing.assert_allclose(rise, 2 * gradient @ way, rtol=1e-5)


def test_metavers_loss_is_that_of_one_query(scene, victims):
  """Eq. 2 by hand: d(e, c_1) + log sum_l exp(-d(e, c_l)), d squared."""
  victim = victims[inversion.LEAKED_PROTOTYPES]
  body = victim.weights['body']
  c = [MODEL.embed(body, tf.constant(x)).numpy().mean(0) for x in scene.support]
  e = MODEL.embed(body, tf.constant(scene.image[np.newaxis])).numpy()[0]
  d = np.array([((e - row) ** 2).sum() for row in c])
  found = victim.loss(
      victim.weights,
      tf.constant(scene.image[np.newaxis]),
      tf.constant([[0.0, 1.0]], tf.float64),
      victim.prototypes,
  )
  np.testing.assert_allclose(found, d[1] + np.log(np.exp(-d).sum()), rtol=1e-10)


def test_fed_avg_and_leaked_prototypes_give_the_image_away(victims, scene):
  results = {
      case: inversion.measure(
          inversion.invert(victim, SHAPE, iterations=5, restarts=1, seed=0),
          victim,
          scene,
      )
      for case, victim in victims.items()
  }
  for case in (inversion.CLASSIFIER, inversion.LEAKED_PROTOTYPES):
    assert results[case]['psnr'] > 60
    assert results[case]['label'] == results[case]['true_label']
  hidden = results[inversion.HIDDEN_PROTOTYPES]
  # Sixteen pixels may leak even so, but not faster than with prototypes known.
  leaked = results[inversion.LEAKED_PROTOTYPES]
  assert hidden['gradient_match'] > leaked['gradient_match']
  assert 0 < hidden['gradient_match'] < hidden['gradient_squared_norm']
  assert hidden['lbfgs_iterations'] == 100


def test_the_start_is_chosen_by_the_gradient_alone(victims, monkeypatch):
  """Whatever the images are like: the attacker does not know the true one."""
  found = iter([3.0, 1.0, 2.0])

  def minimize(attack, start, **kwargs):
    del kwargs
    value = next(found)
    return inversion.optimize.OptimizeResult(
        x=np.full(len(start), value), fun=value, nit=int(value)
    )

  monkeypatch.setattr(inversion.optimize, 'minimize', minimize)
  best = inversion.invert(
      victims[inversion.CLASSIFIER], SHAPE, iterations=1, restarts=3, seed=0
  )
  assert (best.gradient_match, best.lbfgs_iterations) == (1.0, 1)
  np.testing.assert_array_equal(best.image, np.full(SHAPE, 1.0))


def test_measures_are_of_the_image_cut_off(victims, scene):
  victim = victims[inversion.CLASSIFIER]
  off = np.zeros(SHAPE)
  off[0, 0] = 0.4 if scene.image[0, 0, 0] < 0.5 else -0.4
  found = inversion.Reconstruction(scene.image + off, 0, 0.5, 9)
  numbers = inversion.measure(found, victim, scene)
  assert numbers['mse'] == pytest.approx(0.01)
  assert numbers['psnr'] == pytest.approx(20.0)
  white = dataclasses.replace(victim)
  scene = scene._replace(image=np.ones(SHAPE))
  found = found._replace(image=np.full(SHAPE, 7.0))
  numbers = inversion.measure(found, white, scene)
  assert (numbers['mse'], numbers['psnr']) == (0.0, None)


def test_a_scene_has_the_image_among_others_of_its_class():
  corpus = datasets.load_corpus('digits')
  scene = inversion.draw_scene(corpus, 17, ways=3, shots=4, seed=5)
  pixels = corpus.preprocess(corpus.train.x)
  np.testing.assert_array_equal(scene.image, pixels[17])
  assert scene.label == corpus.train.y[17]
  assert scene.support.shape == (3, 4, 8, 8, 1)
  pooled = corpus.preprocess(corpus.pooled().x)
  labels = [
      [
          int(
              corpus.pooled_labels[
                  np.flatnonzero((pooled == x).all((1, 2, 3)))[0]
              ]
          )
          for x in images
      ]
      for images in scene.support
  ]
  assert all(len(set(row)) == 1 for row in labels)
  local = [row[0] for row in labels]
  assert local == sorted(set(local)) and local[scene.local_label] == scene.label
  assert not (scene.support == scene.image).all((2, 3, 4)).any()


@pytest.mark.parametrize(
    'name, changes, problem',
    [
        ('digits', dict(index=1797), '`image_index` in 0..1796, found 1797'),
        ('digits', dict(ways=11), '`local_classes` in 1..10, found 11'),
        ('digits', dict(shots=500), 'at least 500 further images of class'),
        ('synthetic', {}, r'pixels of .synthetic. in \[0, 1\]'),
    ],
)
def test_impossible_scenes(name, changes, problem):
  corpus = datasets.load_corpus(name)
  with pytest.raises(ValueError, match=problem):
    inversion.draw_scene(
        corpus, **(dict(index=0, ways=2, shots=5, seed=0) | changes)
    )
