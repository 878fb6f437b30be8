"""A body that clients share under a head that stays with each of them.

The server's weights are `OrderedDict(body=..., head=OrderedDict())`, with an
empty head, and a client's memory is its head. What a client trains is the two
together. Also of use to algorithms that keep other parts of the head, such as
its learning rates.
"""

import collections
from typing import Any

import tensorflow as tf

from tff_meta.models import model as model_lib

# Apart from the seeds of runs; see `unseen_head`.
_UNSEEN_SEED = (2, 0)


def split(weights: Any) -> tuple[Any, Any]:
  """Takes the head off: `split(merge(shared, head)) == (shared, head)`.

  Args:
    weights: `OrderedDict(body, head)`.

  Returns:
    The same with an empty head, and the head.
  """
  shared = collections.OrderedDict(
      body=weights['body'], head=collections.OrderedDict()
  )
  return shared, weights['head']


def merge(shared: Any, head: Any) -> Any:
  """Puts a head onto a body: `merge(*split(weights)) == weights`.

  Args:
    shared: `OrderedDict(body, head)`; its own head, if any, is dropped.
    head: The parameters of a head.

  Returns:
    `OrderedDict(body, head)`.
  """
  return collections.OrderedDict(body=shared['body'], head=head)


def unseen_head(model: model_lib.Model, num_classes: int) -> Any:
  """The head of a client that training never saw, before it learns.

  Such a client finds a head neither at the server nor in a memory of its own.
  It draws one from a seed that is the same for all clients and all runs.

  Args:
    model: The network.
    num_classes: Number of classes of the client's labels.

  Returns:
    The parameters of a head.
  """
  return model.init_head(tf.constant(_UNSEEN_SEED, tf.int32), num_classes)
