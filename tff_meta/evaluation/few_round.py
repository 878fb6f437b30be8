"""Accuracy in new groups: few rounds of federated adaptation, then a test.

Source: Park et al., "Few-Round Learning for Federated Learning", NeurIPS 2021,
section 4: accuracy of a group's global model on the pooled query sets of its
clients, averaged over many groups, with a 95 % confidence interval.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tff_meta import episodes
from tff_meta.data import few_round_groups
from tff_meta.evaluation import accuracy
from tff_meta.learners import personalizer as personalizer_lib


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
  """

  role: str
  way: int
  num_clients: int
  deployment: str
  num_groups: int
  seed: int
  num_seen: int = 0

  def __post_init__(self):
    if self.num_groups < 1:
      raise ValueError(
          f'Expected `num_groups` of at least 1, found {self.num_groups}.'
      )

  def sample(
      self, pools: few_round_groups.ClassPools, index: int
  ) -> few_round_groups.Group:
    """Returns group number `index`, always the same one."""
    return few_round_groups.sample_group(
        pools,
        role=self.role,
        way=self.way,
        num_clients=self.num_clients,
        deployment=self.deployment,
        num_seen=self.num_seen,
        seed=self.seed,
        index=index,
    )


def build_group_accuracy(
    group_personalizer: personalizer_lib.GroupPersonalizer,
) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
  """Builds the traced function that adapts to a group and tests the result.

  Args:
    group_personalizer: What a new group does with trained weights.

  Returns:
    `(weights, group, seed) -> (num_correct, num_examples)`, float32 scalars.
  """

  @tf.function
  def group_accuracy(weights, group, seed):
    support = episodes.Examples(
        group.support_x, group.support_y, group.support_mask
    )
    query = episodes.Examples(group.query_x, group.query_y, group.query_mask)
    adapted = group_personalizer.adapt(weights, support, group.salts, seed)
    predicted = group_personalizer.predict(adapted, query)
    correct = tf.cast(tf.equal(predicted, query.y), tf.float32) * query.mask
    return tf.reduce_sum(correct), tf.reduce_sum(query.mask)

  return group_accuracy


def evaluate_groups(
    group_accuracy: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    weights: Any,
    pools: few_round_groups.ClassPools,
    protocol: GroupProtocol,
) -> accuracy.AccuracyReport:
  """Adapts to many groups and tests in each.

  Args:
    group_accuracy: From `build_group_accuracy`; reuse it, it is traced once.
    weights: Trained weights, `OrderedDict(body, head)`.
    pools: Images by class.
    protocol: Which groups.

  Returns:
    The accuracy of every group. The same protocol draws the same groups for
    every algorithm.
  """
  weights = tf.nest.map_structure(tf.convert_to_tensor, weights)
  correct, counts = [], []
  for index in range(protocol.num_groups):
    group = protocol.sample(pools, index)
    group = tf.nest.map_structure(
        tf.convert_to_tensor, group._replace(classes=())
    )
    seed = tf.constant([protocol.seed, index], tf.int32)
    num_correct, num_examples = group_accuracy(weights, group, seed)
    correct.append(float(num_correct))
    counts.append(float(num_examples))
  counts = np.array(counts)
  return accuracy.AccuracyReport(
      np.array(correct) / counts, counts.astype(np.int64)
  )
