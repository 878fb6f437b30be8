"""`plain_process` refuses what it has no form of."""

import collections
import dataclasses
import types

import plain_process
import pytest
import tensorflow as tf

from tff_meta import models
from tff_meta import registry
from tff_meta.algorithms import frl
from tff_meta.baselines import fed_avg

_MODEL = models.build('mlp', (2,), None)
_CONFIG = dataclasses.replace(fed_avg.PAPER, batch_size=4)


def _client():
  examples = collections.OrderedDict(
      x=tf.random.stateless_normal([6, 2], [1, 2]), y=[0, 1, 2, 0, 1, 2]
  )
  return collections.OrderedDict(
      examples=tf.data.Dataset.from_tensors(examples),
      salt=tf.data.Dataset.from_tensors(1),
  )


def test_a_composition_and_a_channel_in_the_update_are_refused():
  with pytest.raises(ValueError, match='found `compose`, a channel in the upd'):
    plain_process.PlainProcess('frl', _MODEL, frl.PAPER, 3)


def test_a_network_that_augments_is_refused():
  model = dataclasses.replace(_MODEL, augment=lambda x, seed: x)
  with pytest.raises(ValueError, match='found `augment` of the network'):
    plain_process.PlainProcess('fed_avg', model, _CONFIG, 3)


@pytest.mark.parametrize(
    ('part', 'message'),
    [
        (
            'signal',
            r'Expected the `signal` of a client as it is declared, \(\)',
        ),
        ('memory', 'Expected no memory of clients'),
    ],
)
def test_what_is_not_declared_is_refused(monkeypatch, part, message):
  method = registry.get('fed_avg').method(_MODEL, _CONFIG, 3)

  def client_update(weights, client):
    output = method.client_update(weights, client)
    return output._replace(**{part: tf.constant(1.0)})

  other = dataclasses.replace(method, client_update=client_update)
  spec = types.SimpleNamespace(method=lambda *_: other)
  monkeypatch.setattr(registry, 'get', lambda name: spec)
  process = plain_process.PlainProcess('fed_avg', _MODEL, _CONFIG, 3)
  with pytest.raises(ValueError, match=message):
    process.next(process.initialize(), [_client()])
