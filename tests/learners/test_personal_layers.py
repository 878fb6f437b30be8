"""Which layers are personal, and taking them off and putting them back."""

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tff_meta import models
from tff_meta.learners import personal_layers

MODEL = models.build('fedmeta_per_cifar', (16, 16, 3), 5)
DENSE = [
    [('head', 'kernel'), ('head', 'bias')],
    [('body', 'dense2_kernel'), ('body', 'dense2_bias')],
    [('body', 'dense1_kernel'), ('body', 'dense1_bias')],
]


def build_weights(rates):
  weights = MODEL.initialize(tf.constant([1, 2]))
  if rates:
    weights['rates'] = tf.nest.map_structure(
        lambda w: w + 1, collections.OrderedDict(weights)
    )
  return weights


@pytest.mark.parametrize('num_layers', range(4))
def test_layers_are_counted_from_the_output(num_layers):
  expected = {name for layer in DENSE[:num_layers] for name in layer}
  assert personal_layers.parameters(MODEL, num_layers) == expected


@pytest.mark.parametrize('rates', [False, True])
@pytest.mark.parametrize('num_layers', range(4))
def test_split_and_merge(num_layers, rates):
  weights = build_weights(rates)
  personal = personal_layers.parameters(MODEL, num_layers)
  shared, own = personal_layers.split(weights, personal)
  for side, expected in ((shared, False), (own, True)):
    parts = [side, side.get('rates', {})]
    names = {
        (part, name)
        for parts_of in parts
        for part in ('body', 'head')
        for name in parts_of.get(part, ())
    }
    assert all((pair in personal) == expected for pair in names)
  assert len(tf.nest.flatten(own)) == len(personal) * (2 if rates else 1)
  assert list(shared) == list(weights)
  merged = personal_layers.merge(shared, own)
  tf.nest.assert_same_structure(merged, weights)
  assert [list(part) for part in merged.values()] == [
      list(part) for part in weights.values()
  ]
  tf.nest.map_structure(np.testing.assert_array_equal, merged, weights)


@pytest.mark.parametrize(
    'name, num_layers', [('fedmeta_per_cifar', 4), ('mlp', 2), ('conv4', 2)]
)
def test_only_dense_layers_before_which_something_is_shared(name, num_layers):
  model = models.build(name, (16, 16, 3), 5)
  personal_layers.parameters(model, num_layers - 1)
  with pytest.raises(ValueError, match=f'of {name!r}, found {num_layers}'):
    personal_layers.parameters(model, num_layers)


class Memory(NamedTuple):
  """What a client has kept, as the processes hand it over."""

  present: bool
  value: Any

  def value_or(self, other):
    return self.value if self.present else other


@pytest.mark.parametrize('is_sent', [False, True])
@pytest.mark.parametrize('present', [False, True])
def test_a_client_recalls_its_layers_or_takes_the_first_ones(present, is_sent):
  """The first ones are those sent; where none are, what stands in for them."""
  received = build_weights(rates=True)
  personal = personal_layers.parameters(MODEL, 2)
  shared, sent = personal_layers.split(received, personal)
  value = tf.nest.map_structure(lambda w: w + 3, sent)
  own = personal_layers.recall(
      received if is_sent else shared,
      personal,
      Memory(present, value),
      is_sent=is_sent,
  )
  expected = personal_layers.merge(
      shared, sent if is_sent and not present else value
  )
  tf.nest.map_structure(np.testing.assert_array_equal, own, expected)
  assert personal_layers.recall(received, (), (), is_sent=is_sent) is received
