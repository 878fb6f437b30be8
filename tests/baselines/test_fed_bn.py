"""FedBN: normalisation and its statistics stay with the client."""

import dataclasses
import functools

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf

from tff_meta import models
from tff_meta import registry
from tff_meta import weights as weights_lib
from tff_meta.baselines import fed_bn
from tff_meta.learners import personal_layers

SHAPE = (4, 4, 1)
MODEL = models.build('norm_cnn', SHAPE, None)
NORMS = MODEL.norm_parameters
OWN = {('body', name) for name in NORMS}
LOCAL = dict(
    learning_rate=0.1, momentum=0.5, epochs=2, batch_size=4, weight_decay=0.1
)
CONFIG = fed_bn.FedBnConfig(new_client_epochs=2, **LOCAL)
CLOSE = dict(rtol=1e-4, atol=1e-5)


def make_client(num, salt):
  """Noise whose brightness and contrast are the client's."""
  rng = np.random.default_rng(salt)
  x = salt + 2.0**-salt * rng.normal(size=(num, *SHAPE))
  y = rng.integers(0, 3, num).astype(np.int32)
  return oracle.Client(x.astype(np.float32), y, salt)


CLIENTS = make_client(6, 1), make_client(9, 2)


@functools.cache
def build(name='fed_bn', build_process=plain_process.PlainProcess):
  config = CONFIG
  if name == 'fed_avg':
    paper = registry.get(name).presets['paper']
    config = dataclasses.replace(paper, uniform=True, **LOCAL)
  return build_process(name, MODEL, config, num_classes=3, seed=5)


def assert_close(actual, expected):
  tf.nest.map_structure(
      functools.partial(np.testing.assert_allclose, **CLOSE), actual, expected
  )


def statistics(weights, client):
  return MODEL.statistics(weights['body'], client.x, np.ones(len(client.y)))


def test_a_client_alone_trains_as_with_fed_avg():
  """What of its model the server has, and what the client keeps."""
  cohorts = [CLIENTS[:1]] * 3
  expected = personal.run(build('fed_avg'), cohorts).weights
  result = personal.run(build(), cohorts)
  for round_num, theirs in enumerate(expected):
    shared, own = personal_layers.split(theirs, OWN)
    assert_close(result.weights[round_num], shared)
    if round_num:
      kept = result.heads[round_num - 1][1]
      assert_close(kept['layers'], own)
      assert_close(kept['statistics'], statistics(theirs, CLIENTS[0]))
  moved = expected[-1]['body']['norm2_scale'] - 1
  assert np.abs(moved).max() > 0.05


def test_the_server_averages_all_but_normalisation():
  """And not even a number of it is in the server's state."""
  process = build(build_process=registry.build)
  result = personal.run(process, [CLIENTS, CLIENTS])
  trained = [
      personal.run(build('fed_avg'), [[client]]).weights[1]
      for client in CLIENTS
  ]
  mean = weights_lib.scale(weights_lib.add(*trained), 0.5)
  assert_close(result.weights[1], personal_layers.split(mean, OWN)[0])
  for client, theirs in zip(CLIENTS, trained, strict=True):
    kept = result.heads[0][client.salt]
    assert_close(kept['layers'], personal_layers.split(theirs, OWN)[1])
    assert_close(kept['statistics'], statistics(theirs, client))
  assert list(result.weights[1]['body']) == ['conv1_kernel', 'conv2_kernel']
  known = np.concatenate([np.ravel(v) for v in tf.nest.flatten(result.heads)])
  served = np.concatenate(
      [np.ravel(v) for v in tf.nest.flatten(result.state.global_model_weights)]
  )
  assert not set(known[known != 0]) & set(served)


def test_a_client_without_examples_keeps_what_it_had():
  empty = CLIENTS[0]._replace(x=CLIENTS[0].x[:0], y=CLIENTS[0].y[:0])
  stranger = empty._replace(salt=3)
  cohorts = [CLIENTS, (empty, CLIENTS[1], stranger)]
  process = build(build_process=registry.build)
  first, second = personal.run(process, cohorts).heads
  personal.assert_same(second[1], first[1])
  assert second.keys() == {1, 2}
  assert np.abs(second[2]['statistics']['norm1_mean']).min() > 0


def test_use():
  """Known clients normalise by what they keep, new ones get it first."""
  method = fed_bn.fed_bn(MODEL, CONFIG, 3)
  process, seed = build(), tf.constant([5, 6])
  result = personal.run(process, [CLIENTS])
  weights, memory, initial = tf.nest.map_structure(
      tf.constant,
      (result.weights[1], result.heads[0][2], process.initial_memory),
  )
  client, query = CLIENTS[1], make_client(7, 2)
  empty = client._replace(x=client.x[:0], y=client.y[:0])
  whole = personal_layers.merge(weights, initial['layers'])
  trained, _ = CONFIG.train_for(
      2,
      lambda weights, batch: tf.reduce_mean(
          tf.nn.sparse_softmax_cross_entropy_with_logits(
              batch.y, logits(weights, batch.x)
          )
      ),
      whole,
      client.examples(),
      seed,
  )
  known, new = method.known_client(), method.new_client()
  kept = personal.memory(memory)
  untouched = with_norms(weights, initial)
  for use, given, examples, expected in (
      (known, kept, client, with_norms(weights, memory)),
      (new, (), empty, untouched),
      (new, (), client, with_norms(trained, None, client)),
  ):
    adapted = use.adapt(weights, given, examples.examples(), seed)
    assert_close(adapted, expected)
    labels = use.predict(adapted, query.examples()).numpy()
    np.testing.assert_array_equal(
        labels, np.argmax(logits(expected, query.x), 1)
    )
    one = query._replace(x=query.x[:1], y=query.y[:1]).examples()
    assert use.predict(adapted, one).numpy() == labels[:1]
  assert_close(new.start(weights, ()), untouched)
  assert_close(known.start(weights, kept), with_norms(weights, memory))


def logits(weights, x):
  return MODEL.with_head(3).logits(weights, x)


def with_norms(weights, memory, client=None):
  """A network as it predicts; `memory` of a client, or made of its examples."""
  if memory is None:
    whole, found = weights, statistics(weights, client)
  else:
    whole = personal_layers.merge(weights, memory['layers'])
    found = memory['statistics']
  return whole | {'body': whole['body'] | found}


def test_networks_without_normalisation_are_refused():
  with pytest.raises(ValueError, match="found 'conv4'. Tip: use `norm_cnn`"):
    fed_bn.fed_bn(models.build('conv4', (8, 8, 1), None), CONFIG, 3)
