"""Gradient inversion: what is sent, the objective, what leaks, the study."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import datasets
from tff_meta import episodes
from tff_meta import method
from tff_meta import optimizers
from tff_meta.algorithms import metavers
from tff_meta.analyses import inversion
from tff_meta.analyses import inversion_study
from tff_meta.analyses import smooth_lenet
from tff_meta.learners import classifiers
from tff_meta.learners import few_round
from tff_meta.losses import prototypical

SHAPE = (4, 4, 1)
MODEL = smooth_lenet.build_smooth_lenet(SHAPE)
CASES = inversion.build_cases(MODEL, num_classes=3)


@pytest.fixture(scope='module')
def scene():
  rng = np.random.default_rng(1)
  return inversion.Scene(
      image=rng.uniform(size=SHAPE),
      label=2,
      num_classes=3,
      support=rng.uniform(size=(2, 5, *SHAPE)),
      local_label=1,
      classes=np.array([0, 2]),
  )


@pytest.fixture(scope='module')
def victims(scene):
  return inversion.build_victims(MODEL, CASES, scene, seed=(0, 0))


@pytest.fixture(scope='module')
def attacks():
  return {name: inversion.Attack(case) for name, case in CASES.items()}


def truth(case, victim, prototypes):
  """The unknowns of the victim itself; a label as sure as float64 allows."""
  basis = inversion.to_picture(
      tf.reshape(tf.eye(16, dtype=tf.float64), [16, *SHAPE])
  )
  basis = basis.numpy().reshape(16, 16) - 0.5
  label = np.full(
      victim.truth['label'].shape[1] if 'label' in case.guessed else 0, -60.0
  )
  if len(label):
    label[victim.label] = 60.0
  parts = {'label': label, 'points': prototypes.numpy().ravel()}
  return np.concatenate(
      [
          *(
              np.linalg.solve(basis.T, image.ravel() - 0.5)
              for image in victim.truth['image'].numpy()
          ),
          *(parts[name] for name in case.guessed),
      ]
  )


@pytest.mark.parametrize('name', CASES)
def test_the_victim_itself_matches_and_the_derivative_is_right(
    victims, attacks, name
):
  victim, attack = victims[name], attacks[name]
  prototypes = victims[inversion.LEAKED_PROTOTYPES].truth['points']
  exact, slope = attack(victim, truth(CASES[name], victim, prototypes))
  assert exact < 1e-25
  assert np.abs(slope).max() < 1e-10

  rng = np.random.default_rng(3)
  point = attack.start(victim, rng)
  value, gradient = attack(victim, point)
  assert value > 1e-6  # Embeddings differ little before training.
  for _ in range(3):
    way = rng.standard_normal(len(point))
    way *= 1e-4 / np.linalg.norm(way)
    rise = attack(victim, point + way)[0] - attack(victim, point - way)[0]
    np.testing.assert_allclose(rise, 2 * gradient @ way, rtol=1e-4)


def test_metavers_gradient_is_that_of_one_query(scene, victims):
  """Eq. 2 by hand: d(e, c_1) + log sum_l exp(-d(e, c_l)), d squared."""
  victim = victims[inversion.LEAKED_PROTOTYPES]
  body = victim.weights['body']
  c = [MODEL.embed(body, tf.constant(x)).numpy().mean(0) for x in scene.support]
  with tf.GradientTape() as tape:
    tape.watch(body)
    e = MODEL.embed(body, tf.constant(scene.image[np.newaxis]))
    d = tf.stack([tf.reduce_sum((e - row) ** 2) for row in c])
    loss = d[1] + tf.reduce_logsumexp(-d)
  for expected, found in zip(
      tape.gradient(loss, body).values(),
      victim.sent[0]['body'].values(),
      strict=True,
  ):
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize('config', [metavers.PAPER, metavers.RELEASE])
@pytest.mark.parametrize('is_hybrid', [False, True])
def test_training_hides_the_last_bias_which_is_attacked(
    scene, victims, config, is_hybrid
):
  """Gradients flow through prototypes there, and shifts change no loss."""
  sent = victims[inversion.HIDDEN_PROTOTYPES].sent[0]['body']
  body = tf.nest.map_structure(
      lambda w: tf.cast(w, tf.float32),
      victims[inversion.HIDDEN_PROTOTYPES].weights['body'],
  )
  images = np.concatenate([*scene.support, scene.image[np.newaxis]])
  with tf.GradientTape() as tape:
    tape.watch(body)
    loss, _ = metavers.episode_loss(
        MODEL.embed(body, tf.constant(images, tf.float32)),
        tf.constant([0] * 5 + [1] * 5 + [scene.local_label]),
        tf.constant([1.0] * 10 + [0.0]),
        metavers.Message(tf.constant(0.5), tf.constant(is_hybrid)),
        config,
        num_classes=2,
    )
  trained = tape.gradient(loss, body)

  def share(gradient):
    bias = tf.norm(gradient['dense_bias'])
    return float(bias / tf.linalg.global_norm(tf.nest.flatten(gradient)))

  assert tf.linalg.global_norm(tf.nest.flatten(trained)) > 1e-3
  assert share(trained) < 1e-5
  assert share(sent) > 0.01


def test_a_client_with_two_images_of_a_class_sends_this_in_metavers(victims):
  """The library's own round; which is support of the two it draws itself."""
  victim = victims[inversion.EPISODE]
  trained = metavers.metavers(
      MODEL, dataclasses.replace(metavers.PAPER, shots=1, queries=1), 2
  )
  images, labels = victim.truth['image'], victim.truth['label']
  examples = episodes.Examples(
      tf.cast(images, tf.float32),
      tf.argmax(labels, 1, output_type=tf.int32),
      tf.ones(4),
  )
  seed = tf.constant([1, 2])
  sent = trained.client_update(
      tf.nest.map_structure(lambda w: tf.cast(w, tf.float32), victim.weights),
      method.ClientInput(
          examples,
          seed,
          seed,
          metavers.Message(tf.constant(0.0), tf.constant(False)),
          (),
      ),
  ).update['body']
  errors = []
  for order in [0, 1, 2, 3], [2, 1, 0, 3], [0, 3, 2, 1], [2, 3, 0, 1]:
    drawn = CASES[inversion.EPISODE].message(
        victim.weights, tf.gather(images, order), labels, None
    )[0]['body']
    errors.append(
        tf.linalg.global_norm(
            [tf.cast(drawn[name], tf.float32) - sent[name] for name in drawn]
        )
    )
  errors.sort()
  assert errors[0] < 1e-3 * tf.linalg.global_norm([*sent.values()]) < errors[1]


def test_a_client_with_one_image_sends_this_in_few_round_learning(
    scene, victims
):
  """The library's own round: a step against global prototypes, and a mean."""
  victim = victims[inversion.UPDATE_AND_PROTOTYPE]
  points = victim.truth['points']
  classifier = classifiers.DistanceClassifier(
      MODEL, 2, local_weight=0.75, aux_weight=0.25
  )
  settings = few_round.RoundSettings(
      optimizers.build_optimizer('sgd', 0.5), 60, prototype_source='downloaded'
  )
  weights = tf.nest.map_structure(
      lambda w: tf.cast(w, tf.float32), dict(victim.weights, head={})
  )
  image = episodes.Examples(
      tf.constant(scene.image[np.newaxis], tf.float32),
      tf.constant([scene.local_label]),
      tf.ones([1]),
  )

  def step(present):
    prototypes = prototypical.Prototypes(tf.cast(points, tf.float32), present)
    upload = few_round.client_round(
        classifier, settings, weights, prototypes, image, tf.constant([0, 0])
    )
    change = tf.nest.map_structure(
        lambda a, b: (a - b) / (0.5 * 0.25), weights, upload.weights
    )
    return change['body'], upload.prototypes

  gradient, prototypes = step(tf.ones([2]))
  for name, expected in victim.sent[0]['body'].items():
    np.testing.assert_allclose(gradient[name], expected, atol=1e-4)
  np.testing.assert_array_equal(prototypes.present, [0, 1])
  np.testing.assert_allclose(prototypes.means[1:], victim.sent[1], rtol=1e-5)
  # In the first round there are no global prototypes, and nothing is learned.
  gradient, _ = step(tf.zeros([2]))
  assert all((g.numpy() == 0).all() for g in gradient.values())


def test_gradients_give_the_image_away_unless_prototypes_are_guessed(
    victims, attacks, scene
):
  of_several = inversion.EPISODE, inversion.MINIBATCH
  found = {
      name: inversion.invert(
          attacks[name],
          victim,
          iterations=500 if name in of_several else 100,
          restarts=1,
          seed=(0,),
      )
      for name, victim in victims.items()
  }
  psnr = {
      name: inversion_study.measure(
          scene.image,
          inversion_study.guess_of_the_first(
              victims[name].truth['image'], guess.images
          ),
      )[1]
      for name, guess in found.items()
  }
  hidden = inversion.HIDDEN_PROTOTYPES
  for name in set(CASES) - {hidden, inversion.PROTOTYPE_ONLY}:
    assert psnr[name] > (24 if name in of_several else 60), name
    if 'label' in CASES[name].guessed:
      assert found[name].label == victims[name].label
  assert psnr[hidden] < 30
  # Of sixteen pixels. What matters is that it is no easier to explain.
  assert (
      found[hidden].mismatch > 100 * found[inversion.LEAKED_PROTOTYPES].mismatch
  )
  assert found[hidden].lbfgs_iterations == 100


def test_the_start_is_chosen_by_the_mismatch_alone(
    victims, attacks, monkeypatch
):
  """Whatever the images are like: the attacker does not know the true one."""
  found = iter([np.nan, 3.0, 1.0, 2.0])

  def minimize(attack, start, **kwargs):
    del kwargs
    value = next(found)
    return inversion.optimize.OptimizeResult(
        x=np.zeros(len(start)), fun=value, nit=np.nan_to_num(value)
    )

  monkeypatch.setattr(inversion.optimize, 'minimize', minimize)
  name = inversion.CLASSIFIER
  best = inversion.invert(
      attacks[name], victims[name], iterations=1, restarts=4, seed=(0,)
  )
  assert (best.mismatch, best.lbfgs_iterations) == (1.0, 1)
  np.testing.assert_allclose(best.images[0], np.full(SHAPE, 0.5))


def test_each_guess_is_taken_for_another_image():
  """By hand: the best guess of the first one is needed for the second."""
  values = np.array([0.5, 0.9]), np.array([0.8, 0.1])
  images, guesses = (
      np.full((2, *SHAPE), v[:, None, None, None]) for v in values
  )
  found = inversion_study.guess_of_the_first(images, guesses)
  np.testing.assert_array_equal(found, np.full(SHAPE, 0.1))


def test_random_pictures_have_the_stated_mean_and_contrast():
  coefficients = np.random.default_rng(0).standard_normal((4000, 6, 8, 1))
  pictures = inversion.to_picture(tf.constant(coefficients)).numpy()
  assert pictures.mean() == pytest.approx(0.5, abs=0.01)
  assert pictures.std() == pytest.approx(0.25, abs=0.005)
  # Neighbours are alike.
  assert np.diff(pictures, axis=1).std() < 0.25


def test_measures_are_of_the_image_cut_off(scene):
  off = np.zeros(SHAPE)
  off[0, 0] = 0.4 if scene.image[0, 0, 0] < 0.5 else -0.4
  mse, psnr, ssim = inversion_study.measure(scene.image, scene.image + off)
  assert (mse, psnr) == (pytest.approx(0.01), pytest.approx(20.0))
  assert 0 < ssim < 1
  white = np.ones(SHAPE), np.full(SHAPE, 7.0)
  assert inversion_study.measure(*white) == (0.0, 120.0, 1.0)


def test_a_study_goes_on_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
  """Attacks are of random guesses here; the program's test has real ones."""

  def guess(attack, victim, *, iterations, restarts, seed):
    del attack, restarts
    rng = np.random.default_rng(seed)
    images = rng.uniform(size=victim.truth['image'].shape)
    return inversion.Reconstruction(images, 0, rng.uniform(), iterations)

  monkeypatch.setattr(inversion, 'invert', guess)
  corpus = datasets.load_corpus('digits')
  settings = inversion_study.Settings('digits', 'a', 2, 3, 4, 2, 7)

  def run(root, num_images, settings=settings):
    lines = []
    rows = inversion_study.run(corpus, settings, num_images, root, lines.append)
    summary = json.dumps(inversion_study.summarize(rows))
    files = {p.name: p.read_bytes() for p in root.rglob('*') if p.is_file()}
    return files, summary, len(lines)

  whole, cut = tmp_path / 'whole', tmp_path / 'cut'
  files, summary, attacked = run(whole, 2)
  assert attacked == 2 and len(files) == 3
  assert files['inversion.csv'].count(b'\n') == 1 + 2 * 9
  assert run(cut, 1)[2] == 1
  assert run(cut, 2) == (files, summary, 1)
  assert run(cut, 2) == (files, summary, 0)
  # An image whose picture is lost is attacked again.
  sorted((cut / 'pictures').iterdir())[0].unlink()
  assert run(cut, 2) == (files, summary, 1)
  shutil.rmtree(cut / 'pictures')
  assert run(cut, 2) == (files, summary, 2)
  # So is one that lacks a case, as one of an earlier version does.
  lines = files['inversion.csv'].splitlines(keepends=True)
  table = cut / 'inversion.csv'
  table.write_bytes(b''.join(x for x in lines if b',grey,' not in x))
  assert run(cut, 2) == (files, summary, 2)
  assert json.loads(run(cut, 1)[1])['grey']['images'] == 1
  with pytest.raises(
      ValueError, match='to be of seed=8, found seed=7. Tip.*output_'
  ):
    run(cut, 2, dataclasses.replace(settings, seed=8))
  with pytest.raises(ValueError, match='to be of fingerprint=b, found .*=a'):
    run(cut, 2, dataclasses.replace(settings, fingerprint='b'))
  table.write_bytes(files['inversion.csv'].replace(b',ssim,', b',other,'))
  with pytest.raises(ValueError, match="row without one .'ssim'."):
    run(cut, 2)
  # A table of an earlier version says nothing of the data.
  table.write_bytes(
      files['inversion.csv'].replace(b',a,', b',').replace(b'fingerprint,', b'')
  )
  assert run(cut, 2)[1:] == (summary, 0)
  table.write_bytes(files['inversion.csv'])
  with pytest.raises(ValueError, match='`images` of at most 1797, all of'):
    run(cut, 1798)
  assert run(cut, 2) == (files, summary, 0)


def test_a_summary_by_hand():
  def row(index, case, psnr, label=None, mismatch=None):
    return inversion_study.Row(
        index, 0, case, 0.1, psnr, psnr / 100, mismatch, 9, label, 1
    )

  summary = inversion_study.summarize(
      [
          row(4, 'classifier', 30.0, 1, 0.5),
          row(4, 'grey', 10.0),
          row(2, 'classifier', 18.0, 0, 0.1),
          row(2, 'grey', 12.0),
          row(4, 'prototype_only', 12.0, 1, 0.0),
          row(2, 'prototype_only', 12.0, 1, 0.0),
          row(4, 'minibatch', 14.0),
          row(2, 'minibatch', 16.0),
          row(4, 'episode', 17.0),
          row(2, 'episode', 19.0),
      ]
  )
  # Student's t of one degree of freedom: 12.706 s / sqrt(2), s = 12 / sqrt(2).
  assert summary['classifier'] == {
      'images': 2,
      'psnr': {'mean': 24.0, 'half_width_95': pytest.approx(76.237, abs=0.001)},
      'ssim': {'mean': 0.24, 'half_width_95': pytest.approx(0.76237, abs=1e-5)},
      'recognised': 1,
      'right_labels': 1,
      'median_mismatch': 0.3,
  }
  grey = summary['grey']
  assert grey['psnr_difference']['mean'] == -13.0
  assert grey['psnr_difference']['half_width_95'] == pytest.approx(
      12.706 * 7, abs=0.01
  )
  assert (grey['recognised'], grey['right_labels']) == (0, None)
  # Against FedAvg's message of as many images.
  assert summary['episode']['psnr_difference'] == dict(mean=3, half_width_95=0)
  # The label is sent.
  assert summary['prototype_only']['right_labels'] is None
  assert summary['prototype_only']['psnr']['half_width_95'] == 0


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
  assert local == scene.classes.tolist()
  assert local == sorted(set(local)) and local[scene.local_label] == scene.label
  assert not (scene.support == scene.image).all((2, 3, 4)).any()


@pytest.mark.parametrize(
    'name, changes, problem',
    [
        ('digits', dict(index=1797), '`image_index` in 0..1796, found 1797'),
        ('digits', dict(ways=11), '`local_classes` in 2..10, found 11'),
        ('digits', dict(shots=1), '`shots` of at least 2, found 1'),
        ('digits', dict(shots=500), r'most 1\d\d, the further .* found 500'),
        ('synthetic', {}, r'pixels of .synthetic. in \[0, 1\]'),
    ],
)
def test_impossible_scenes(name, changes, problem):
  corpus = datasets.load_corpus(name)
  with pytest.raises(ValueError, match=problem):
    inversion.draw_scene(
        corpus, **(dict(index=0, ways=2, shots=5, seed=0) | changes)
    )
