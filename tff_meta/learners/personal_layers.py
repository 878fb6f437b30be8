"""Weights of which the last dense layers stay with each client.

The weights are `OrderedDict(body, head)`; a part `rates`, with a learning rate
for every parameter in the same structure, is taken apart like them.
"""

import collections
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from tff_meta.models import model as model_lib

Weights = collections.OrderedDict


def parameters(
    model: model_lib.Model, num_layers: int, name: str = 'personal_layers'
) -> frozenset[tuple[str, str]]:
  """The parameters of the last dense layers, as pairs of part and name.

  Args:
    model: The network.
    num_layers: How many dense layers, counted from the output: 0 is none, 1 the
      head, more reach into the body.
    name: What an error calls that number.

  Returns:
    Pairs such as `('head', 'kernel')` and `('body', 'dense2_bias')`.

  Raises:
    ValueError: If the network does not end in so many dense layers, or has no
      other.
  """
  if not num_layers:
    return frozenset()
  with tf.Graph().as_default():
    weights = model.with_head(1).initialize(tf.constant([0, 0]))
  # `dense2_kernel` and `dense2_bias` are parameters of the layer `dense2`.
  layer = {param: param.rpartition('_')[0] for param in weights['body']}
  layers = list(dict.fromkeys(layer.values()))
  num_shared = len(layers) - (num_layers - 1)
  own = layers[max(num_shared, 0) :]
  if num_shared < 1 or not all(found.startswith('dense') for found in own):
    raise ValueError(
        f'Expected `{name}` to count dense layers from the output and to leave'
        f' some other layer of {model.name!r}, found {num_layers};'
        f' before the head it has {", ".join(weights["body"])}. Tip: 1 is the'
        ' head.'
    )
  body = {('body', param) for param in layer if layer[param] in own}
  return frozenset(body | {('head', param) for param in weights['head']})


def split(
    weights: Weights, personal: Collection[tuple[str, str]]
) -> tuple[Weights, Weights]:
  """Takes the personal layers off.

  Args:
    weights: All of the weights.
    personal: What `parameters` returns.

  Returns:
    What is shared, in which a part may be empty, and what is personal, without
    empty parts.
  """
  shared, own = collections.OrderedDict(), collections.OrderedDict()
  for part, params in weights.items():
    if part == 'rates':
      shared[part], own_part = split(params, personal)
    else:
      shared[part], own_part = (
          collections.OrderedDict(
              (name, value)
              for name, value in params.items()
              if ((part, name) in personal) == wanted
          )
          for wanted in (False, True)
      )
    if own_part:
      own[part] = own_part
  return shared, own


def merge(shared: Weights, own: Weights) -> Weights:
  """Puts the personal layers back: `merge(*split(weights, ...)) == weights`.

  Args:
    shared: What `split` returned first.
    own: What it returned second.

  Returns:
    All of the weights; the parameters of the personal layers come last.
  """
  merged = collections.OrderedDict()
  for part, params in shared.items():
    theirs = own.get(part, collections.OrderedDict())
    if part == 'rates':
      merged[part] = merge(params, theirs)
    else:
      merged[part] = collections.OrderedDict([*params.items(), *theirs.items()])
  return merged


def recall(
    received: Weights,
    personal: Collection[tuple[str, str]],
    memory: Any,
    *,
    is_sent: bool,
) -> Weights:
  """Puts a client's own personal layers onto what it received.

  Args:
    received: Of the server, with personal layers if these are sent.
    personal: What `parameters` returns.
    memory: The client's `ClientMemory` of its personal layers.
    is_sent: Whether a client that has none yet takes those that it received;
      otherwise it takes the initial ones, which stand in for a memory.

  Returns:
    All of the weights.
  """
  if not personal:
    return received
  shared, sent = split(received, personal)
  return merge(shared, memory.value_or(sent) if is_sent else memory.value)
