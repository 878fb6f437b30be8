"""What analyses take from runs: trajectories and embeddings of clients."""

import numpy as np
import pytest
import tensorflow as tf

from tff_meta.analyses import projections
from tff_meta.analyses import trajectory
from tff_meta.client_works import client_work
from tff_meta.models import hypernetwork as hypernetwork_lib
from tff_meta.training import checkpoints
from tff_meta.training import client_state_store
from tff_meta.training import embeddings
from tff_meta.training import experiment as experiment_lib
from tff_meta.training import protocols
from tff_meta.training import run_config

pytestmark = pytest.mark.ci

_DEFAULTS = dict(
    algorithm='fedec',
    preset='demo',
    dataset='synthetic',
    dataset_options='num_classes=6,examples_per_class=12',
    test_fraction=0.5,
    stratify=False,
    validation_fraction=0.0,
    num_clients=3,
    num_new_clients=0,
    new_clients='held_out',
    clients_per_round=2,
    absent_clients=0.1,
    slow_clients=0.4,
    rounds=4,
    seed=1,
    checkpoint_every=1,
    eval_every=0,
    select_best=False,
    select_by='macro',
    patience=0,
    validation_groups=1,
    protocols=(),
    eval_groups=1,
    execution='in_process',
)


def prepare(**changes):
  return experiment_lib.prepare(run_config.resolve(**(_DEFAULTS | changes)))


@pytest.fixture(scope='module')
def experiment():
  return prepare()


@pytest.fixture(scope='module')
def found(experiment):
  return trajectory.Recording(experiment, 4, 2).run()


def models_after_updates(experiment):
  """Client and round -> its model, from the training process itself."""
  process = experiment.build_process()
  state = process.initialize()
  memories, updates = {}, {}
  for round_num in range(1, 5):
    present = experiment.config.training.availability().present(
        experiment.cohort(round_num), experiment.config.seed, round_num
    )
    cohort, data = [client_id for client_id, _ in present.clients], []
    for client_id, part in present.clients:
      client = experiment.dataset.tff_client_data(client_id, part)
      client['memory'] = client_work.memory_dataset(
          process.initial_memory, memories.get(client_id)
      )
      data.append(client)
    output, kept = process.next_with_memory(state, data)
    state = output.state
    for client_id, memory in zip(cohort, kept, strict=True):
      memories[client_id] = memory.value
      updates[client_id, round_num] = memory.value
  return updates


def test_a_trajectory_is_what_training_itself_gives(experiment, found):
  updates = models_after_updates(experiment)
  assert [len(t.rounds) for t in found] == [3, 3]
  for client_id, rounds, features in found:
    assert rounds == tuple(r for c, r in updates if c == client_id)
    x = experiment.dataset.client(client_id).train.x
    expected = [
        tf.reduce_mean(
            experiment.model.embed(updates[client_id, r]['body'], x, None), 0
        )
        for r in rounds
    ]
    np.testing.assert_allclose(features, expected, rtol=1e-5, atol=1e-6)


def test_a_step_in_units_of_nothing_is_no_number():
  """Of a client whose units are dead; the other has steps of its own norm."""
  dead = trajectory.Trajectory('a', (1, 2), np.zeros([2, 2]))
  alive = trajectory.Trajectory('b', (1, 2), np.array([[1, 0], [0, 1]]))
  assert trajectory.summarize([dead])['relative_step_length'] is None
  numbers = trajectory.summarize([dead, alive])
  assert numbers['relative_step_length'] == pytest.approx(2**0.5)


def test_steps_are_distances_between_updates():
  ways = [
      trajectory.Trajectory('a', (1, 2, 5), np.array([[0, 0], [3, 4], [3, 5]])),
      trajectory.Trajectory('b', (2, 3), np.array([[0, 2], [0, 1]])),
  ]
  numbers = trajectory.summarize(ways)
  assert numbers['clients'][0]['step_lengths'] == [5, 1]
  assert numbers['mean_step_length'] == (3 + 1) / 2
  norm = (0 + 5 + 34**0.5) / 3
  assert numbers['relative_step_length'] == pytest.approx(
      (3 / norm + 1 / 1.5) / 2
  )
  panel = trajectory.build_panel('fedec', ways, projections.Layout('pca'))
  path, last = panel.layers
  np.testing.assert_array_equal(path.labels, [0, 0, 0, 1, 1])
  np.testing.assert_array_equal(last.xy, path.xy[[2, 4]])


@pytest.mark.parametrize(
    'changes, rounds, clients, problem',
    [
        ({}, 5, 1, "between 1 and the run's 4, found 5"),
        ({}, 1, 1, 'at least 1 clients that are sampled twice, found 0'),
        (
            dict(aggregation='dp', aggregation_options='noise_multiplier=1'),
            4,
            2,
            'done again, found one with --aggregation=dp',
        ),
        (dict(algorithm='fed_avg'), 4, 2, "keep the model .* 'fed_avg'"),
        (dict(algorithm='fed_per'), 4, 2, "keep the model .* 'fed_per'"),
    ],
)
def test_impossible_trajectories(changes, rounds, clients, problem):
  with pytest.raises(ValueError, match=problem):
    trajectory.Recording(prepare(**changes), rounds, clients)


def test_embeddings_are_of_all_test_examples_by_the_global_body(experiment):
  process = experiment.build_process()
  model = protocols.untrained_model(process)
  found = embeddings.embed_test_examples(experiment, *model)
  assert embeddings.embedded_by(experiment) == 'global'
  tests = [
      experiment.dataset.client(c).test for c in experiment.dataset.client_ids()
  ]
  np.testing.assert_array_equal(
      found.labels, np.concatenate([test.y for test in tests])
  )
  x = np.concatenate([test.x for test in tests])
  expected = experiment.model.embed(model.weights['body'], x, None)
  np.testing.assert_allclose(found.embeddings, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('algorithm', ['local', 'fed_proto', 'lg_fed_avg'])
def test_clients_embed_by_their_own_bodies(algorithm):
  experiment = prepare(algorithm=algorithm)
  process = experiment.build_process()
  states = client_state_store.InMemoryStore()
  first, *others = experiment.dataset.client_ids()
  own = tf.nest.map_structure(
      lambda w: 2.0 * w,
      process.get_model_weights(process.initialize()).trainable,
  )
  kept = own
  if algorithm == 'fed_proto':
    kept = process.initial_memory | {'weights': own}
  elif algorithm == 'lg_fed_avg':
    layers = tf.nest.map_structure(
        lambda w: 2.0 * w, process.initial_memory['layers']
    )
    kept = process.initial_memory | {
        'layers': layers,
        'num_rounds': np.int32(1),
    }
  states.write(first, 1, checkpoints.to_arrays(kept))
  model = protocols.model(process, process.initialize(), states)
  found = embeddings.embed_test_examples(experiment, *model).embeddings
  assert embeddings.embedded_by(experiment) == 'client'

  def embed(weights, client_id):
    x = experiment.dataset.client(client_id).test.x
    return experiment.model.embed(weights['body'], x, None)

  expected = [embed(own, first)]
  expected += [embed(model.weights, client_id) for client_id in others]
  np.testing.assert_allclose(
      found, np.concatenate(expected), rtol=1e-5, atol=1e-5
  )


def test_clients_embed_by_the_bodies_that_a_hypernetwork_makes():
  """From what a client keeps, and from zeros if it was never sampled."""
  experiment = prepare(algorithm='pfedhn')
  process = experiment.build_process()
  states = client_state_store.InMemoryStore()
  first, *others = experiment.dataset.client_ids()
  kept = tf.nest.map_structure(lambda w: w + 1, process.initial_memory)
  states.write(first, 1, checkpoints.to_arrays(kept))
  model = protocols.model(process, process.initialize(), states)
  found = embeddings.embed_test_examples(experiment, *model).embeddings
  assert embeddings.embedded_by(experiment) == 'client'

  hparams = experiment.config.hparams
  hypernetwork = hypernetwork_lib.Hypernetwork(
      experiment.model.with_head(experiment.dataset.num_classes),
      hparams.embedding_size,
      hparams.hidden_layers,
      hparams.hidden_units,
  )

  def embed(embedding, client_id):
    network = hypernetwork.generate(model.weights, tf.constant(embedding))
    x = experiment.dataset.client(client_id).test.x
    return experiment.model.embed(network['body'], x, None)

  assert hypernetwork.input_size == 1
  expected = [embed([1.0], first), *(embed([0.0], c) for c in others)]
  np.testing.assert_allclose(
      found, np.concatenate(expected), rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize(
    'preset, hparams',
    [('release', 'gating=c0'), ('demo', ''), ('demo', 'gating=c2')],
)
def test_what_an_algorithm_has_rebuilt_embeds(preset, hparams):
  """With labels, in the context that there is before any step: none."""
  experiment = prepare(
      algorithm='cafeme', model='modulated_mlp', preset=preset, hparams=hparams
  )
  process = experiment.build_process()
  model = protocols.untrained_model(process)
  found = embeddings.embed_test_examples(experiment, *model).embeddings
  network = experiment.model.rebuild(
      experiment.dataset.num_classes,
      gating=experiment.config.hparams.gating,
      num_labels=experiment.dataset.num_classes * (preset == 'demo'),
  )
  body, expected = model.weights['body'], []
  for client_id in experiment.dataset.client_ids():
    x = experiment.dataset.client(client_id).test.x
    if preset == 'demo':
      start = experiment.method.known_client().start(model.weights, ())
      expected.append(network.embed_modulated(body, start.eta, x))
    else:
      expected.append(network.embed(body, x))
  np.testing.assert_allclose(
      found, np.concatenate(expected), rtol=1e-5, atol=1e-6
  )
  num_parameters = sum(np.size(w) for w in tf.nest.flatten(model.weights))
  assert network.num_parameters() == num_parameters
  of_experiment = experiment.network.with_head(experiment.dataset.num_classes)
  assert of_experiment.num_parameters() == num_parameters


@pytest.mark.parametrize(
    'changes',
    [
        dict(algorithm='fed_bn'),
        dict(
            algorithm='fedmeta_per',
            model='fedec_mlp',
            hparams='personal_layers=2',
        ),
    ],
    ids=str,
)
def test_half_a_body_embeds_nothing(changes):
  experiment = prepare(**changes)
  with pytest.raises(ValueError, match='lacks a part'):
    embeddings.check_can_embed(experiment)


def test_a_body_under_own_heads_embeds():
  embeddings.check_can_embed(prepare(algorithm='fedmeta_per'))


def test_clients_without_test_examples_cannot_be_embedded():
  experiment = prepare(test_fraction=0.0)
  model = protocols.untrained_model(experiment.build_process())
  with pytest.raises(ValueError, match='test examples, found none'):
    embeddings.embed_test_examples(experiment, *model)
