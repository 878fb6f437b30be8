"""What TFF runs is what the functions of a `Method` say, for every kind of one.

The other tests of baselines take most of their variants through these functions
alone.
"""

import dataclasses

import few_round_oracle as oracle
import numpy as np
import personal_head_oracle as personal
import plain_process
import pytest
import tensorflow as tf
import tree

from tff_meta import registry

LOCAL = dict(learning_rate=0.2, batch_size=4)


@pytest.mark.parametrize(
    'name, change',
    [
        # Weights of the server alone, by examples and alike.
        ('fed_avg', dict(momentum=0.5, epochs=2, uniform=False)),
        ('fed_avg', dict(optimizer='adam', momentum=0.0, uniform=True)),
        # A memory, a signal, and an optimizer of the server.
        ('scaffold', dict(server_learning_rate=1.5, num_clients=5)),
        # A memory and a number of rounds.
        ('lg_fed_avg', dict(averaged_rounds=1)),
        # A server's optimizer with momentum, and seeds of no round.
        ('pfedhn', dict(server_momentum=0.5, num_clients=5, hidden_units=3)),
        # Several models.
        ('ifca', dict(clusters=3)),
        # A signal alone.
        ('fed_proto', dict(prototype_weight=2.0)),
        # A coin in the message.
        ('l2gd', dict(averaging_probability=0.7)),
    ],
    ids=str,
)
def test_a_process_computes_what_its_method_says(name, change):
  spec = registry.get(name)
  config = dataclasses.replace(spec.presets['paper'], **LOCAL | change)
  by_tff, plain = (
      personal.run(
          build(
              name,
              oracle.build_model(),
              config,
              oracle.NUM_CLASSES,
              seed=oracle.RUN_SEED,
          ),
          (oracle.CLIENTS[:2], oracle.CLIENTS, oracle.CLIENTS[1:]),
      )
      for build in (registry.build, plain_process.PlainProcess)
  )
  for actual, expected in (
      (by_tff.weights, plain.weights),
      (by_tff.heads, plain.heads),
      ([m['loss'] for m in by_tff.metrics], [m['loss'] for m in plain.metrics]),
      (
          [m['num_examples'] for m in by_tff.metrics],
          [m['num_examples'] for m in plain.metrics],
      ),
  ):
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        actual,
        expected,
    )
  first, *_, last = map(tree.flatten, by_tff.weights)
  moved = any(
      not np.array_equal(a, b) for a, b in zip(first, last, strict=True)
  )
  assert moved == (name != 'fed_proto')  # Whose clients keep their models.
