"""Accuracy in new groups: few rounds of federated adaptation, then a test.

Source: Park et al., "Few-Round Learning for Federated Learning", NeurIPS 2021,
section 4: accuracy of a group's global model on the pooled query sets of its
clients, averaged over many groups, with a 95 % confidence interval.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import tensorflow as tf
import tqdm

from tff_meta import episodes
from tff_meta.data import few_round_groups
from tff_meta.evaluation import client_metrics
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


def build_group_test(
    group_personalizer: personalizer_lib.GroupPersonalizer,
) -> Callable[..., tf.Tensor]:
  """Builds the traced function that adapts to a group and asks the result.

  Args:
    group_personalizer: What a new group does with trained weights.

  Returns:
    `(weights, group, seed) -> labels`, int32 [Q], of all query rows of the
    group, padding among them.
  """

  @tf.function(autograph=False)
  def group_test(weights, group, seed):
    support = episodes.Examples(
        group.support_x, group.support_y, group.support_mask
    )
    query = episodes.Examples(group.query_x, group.query_y, group.query_mask)
    adapted = group_personalizer.adapt(weights, support, group.salts, seed)
    return group_personalizer.predict(adapted, query)

  return group_test


def evaluate_groups(
    group_test: Callable[..., tf.Tensor],
    weights: Any,
    pools: few_round_groups.ClassPools,
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
  answers = []
  groups = tqdm.trange(
      protocol.num_groups, unit='group', leave=False, disable=None
  )
  for index in groups:
    group = protocol.sample(pools, index)
    tensors = tf.nest.map_structure(
        tf.convert_to_tensor, group._replace(classes=())
    )
    seed = tf.constant([protocol.seed, index], tf.int32)
    predicted = group_test(weights, tensors, seed).numpy()
    asked = group.query_mask > 0
    answers.append(
        client_metrics.Answers(
            id=f'group_{index}',
            num_support=int(group.support_mask.sum()),
            labels=group.query_y[asked],
            before=None,
            after=predicted[asked],
            curve=None,
        )
    )
  return client_metrics.report(answers, unit='group')
