"""Accuracy in new groups: few rounds of federated adaptation, then a test.

Source: Park et al., "Few-Round Learning for Federated Learning", NeurIPS 2021,
section 4: accuracy of a group's global model on the pooled query sets of its
clients, averaged over many groups, with a 95 % confidence interval (here as
there 1.96 standard errors, which is too narrow for few groups).
"""

from collections.abc import Iterable, Iterator
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tff_meta import dealing
from tff_meta import episodes
from tff_meta import machine
from tff_meta import progress
from tff_meta.data import groups as groups_lib
from tff_meta.evaluation import certainty
from tff_meta.evaluation import client_metrics
from tff_meta.learners import personalizer as personalizer_lib

# How many at most one call of a traced function adapts to, and their bytes.
_MOST_TOGETHER = 64
_MOST_BYTES = 64 * 2**20
# And where they are dealt over other processes, each of which takes some.
_MOST_DEALT = 8

# What is told of a test until the first batch is done.
TRACED = 'the first ones are traced'


def batches(items: Iterable[Any]) -> Iterator[list[Any]]:
  """Yields groups or clients in lists that are not too large to copy.

  Args:
    items: Structures whose leaves may be arrays.

  Yields:
    At most 64, or 8 where they are dealt over other processes, and no more
    than 64 MiB unless as many of them as are computed at the same time are
    larger.
  """
  most = _MOST_TOGETHER if dealing.dealer() is None else _MOST_DEALT
  together: list[Any] = []
  num_bytes = 0
  for item in items:
    size = sum(getattr(leaf, 'nbytes', 0) for leaf in tf.nest.flatten(item))
    if len(together) == most or (
        len(together) >= machine.PARALLEL and num_bytes + size > _MOST_BYTES
    ):
      yield together
      together, num_bytes = [], 0
    together.append(item)
    num_bytes += size
  if together:
    yield together


@dataclasses.dataclass(frozen=True)
class GroupProtocol:
  """Which groups are drawn.

  Attributes:
    role: Whose classes: `'meta_test'`, `'meta_validation'` or `'meta_train'`.
    way: Classes of a group.
    num_clients: Clients of a group, K.
    deployment: `'iid'` or `'non_iid'`.
    num_groups: How many groups, at least 1.
    seed: Of the groups and of the adaptation.
    num_seen: Classes of a group that are meta-train classes instead.
    shots: Support examples of every class that a client holds; None for half of
      what it has.
  """

  role: str
  way: int
  num_clients: int
  deployment: str
  num_groups: int
  seed: int
  num_seen: int = 0
  shots: int | None = None

  def __post_init__(self):
    if self.num_groups < 1:
      raise ValueError(
          f'Expected `num_groups` of at least 1, found {self.num_groups}.'
      )

  def sample(
      self, pools: groups_lib.ClassPools, index: int
  ) -> groups_lib.Group:
    """Returns group number `index`, always the same one."""
    return groups_lib.sample_group(
        pools,
        role=self.role,
        way=self.way,
        num_clients=self.num_clients,
        deployment=self.deployment,
        num_seen=self.num_seen,
        shots=self.shots,
        seed=self.seed,
        index=index,
    )


def build_group_test(
    group_personalizer: personalizer_lib.GroupPersonalizer,
) -> tf.types.experimental.GenericFunction:
  """Builds the traced function that adapts to groups and asks the results.

  It is a loop over groups, of which some are computed at the same time; what a
  group answers does not depend on the others.

  Args:
    group_personalizer: What a new group does with trained weights.

  Returns:
    `(weights, groups, seeds) -> (labels, certainty)`, int32 [G, Q], of all
    query rows of the groups, padding among them, and their `Certainty`, `()`
    where a personalizer does not tell it. Each leaf of `groups` has a leading
    axis of G groups; `seeds` is int32 [G, 2].
  """
  predict = group_personalizer.predict

  @tf.function(autograph=False)
  def group_test(weights, groups, seeds):
    def one_group(arguments):
      group, seed = arguments
      support = episodes.Examples(
          group.support_x, group.support_y, group.support_mask
      )
      query = episodes.Examples(group.query_x, group.query_y, group.query_mask)
      adapted = group_personalizer.adapt(weights, support, group.salts, seed)
      answers = certainty.ask(predict, adapted, query)
      return certainty.mark(predict, answers, query.y)

    return tf.map_fn(
        one_group,
        (groups, seeds),
        fn_output_signature=certainty.specs(predict),
        parallel_iterations=machine.PARALLEL,
    )

  return group_test


def evaluate_groups(
    group_test: tf.types.experimental.GenericFunction,
    weights: Any,
    pools: groups_lib.ClassPools,
    protocol: GroupProtocol,
) -> client_metrics.Report:
  """Adapts to many groups and tests in each.

  Args:
    group_test: From `build_group_test`; reuse it, it is traced once.
    weights: Trained weights, `OrderedDict(body, head)`.
    pools: Images by class.
    protocol: Which groups.

  Returns:
    The report of every group, which has no model before it has adapted. The
    same protocol draws the same groups for every algorithm.
  """
  weights = tf.nest.map_structure(tf.convert_to_tensor, weights)
  drawn = (
      (index, protocol.sample(pools, index))
      for index in range(protocol.num_groups)
  )

  def calls():
    for together in batches(drawn):
      indices, groups = zip(*together, strict=True)
      arguments = tf.nest.map_structure(
          lambda *leaves: tf.constant(np.stack(leaves)),
          *(group._replace(classes=()) for group in groups),
      )
      seeds = tf.constant([[protocol.seed, index] for index in indices])
      yield together, (arguments, seeds)

  def any_number(shared, arguments):
    return (
        *tf.nest.map_structure(tf.TensorSpec.from_tensor, shared),
        *tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), arguments
        ),
    )

  answers: list[client_metrics.Answers] = []
  shown = progress.Progress(
      'groups tested', protocol.num_groups, 'groups', first=TRACED
  )
  with shown:
    for together, result in dealing.call_all(
        group_test, any_number, (weights,), calls()
    ):
      labels, how_sure = tf.nest.map_structure(np.asarray, result)
      for i, (index, group) in enumerate(together):
        asked = group.query_mask > 0
        own = tf.nest.map_structure(
            lambda part, i=i, asked=asked: part[i][asked], how_sure
        )
        answers.append(
            client_metrics.Answers(
                id=f'group_{index}',
                num_support=int(group.support_mask.sum()),
                labels=group.query_y[asked],
                before=None,
                after=labels[i][asked],
                curve=None,
                certainty=own or None,
            )
        )
      shown.update(len(answers))
  return client_metrics.report(answers, unit='group')
