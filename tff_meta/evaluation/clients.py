"""How good the models are that single clients get: one evaluation for all.

A client adapts on some of its examples, as its algorithm's personalizer does,
and is tested on others, before and after. It is a client of the training
population (which may remember something), one that training never saw, or one
of a group whose classes training never saw.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_meta import dealing
from tff_meta import episodes
from tff_meta import machine
from tff_meta import progress
from tff_meta.data import corpus as corpus_lib
from tff_meta.data import federated_dataset
from tff_meta.data import groups as groups_lib
from tff_meta.evaluation import certainty
from tff_meta.evaluation import client_metrics
from tff_meta.evaluation import groups as group_evaluation
from tff_meta.learners import personalizer as personalizer_lib


class ClientTask(NamedTuple):
  """A client to be tested.

  Attributes:
    client_id: Its name.
    support: What it adapts on, x float32 [n, ...] and y int32 [n].
    query: What it is tested on, at least one example.
    salt: int32, makes its random numbers its own.
  """

  client_id: str
  support: corpus_lib.LabelledExamples
  query: corpus_lib.LabelledExamples
  salt: int


@dataclasses.dataclass(frozen=True)
class ClientProtocol:
  """Which clients are tested on which of their examples.

  Attributes:
    role: `'meta_train'`, clients of the training population, or `'meta_test'`,
      held out of it.
    part: What they are tested on, `'test'` or `'validation'`.
    support_fraction: None to adapt on the client's train part and be tested on
      all of `part`; otherwise the share, in (0, 1), of `part` to adapt on,
      floor(fraction * n) examples at random, the rest being tested on.
    seed: Of that split and of the adaptation.
    most: How many clients at most, evenly spaced among those that could be
      tested; None for all.
    shots: Examples of a class to adapt on at most, the first ones; None for
      all.
  """

  role: str
  part: str
  support_fraction: float | None
  seed: int
  most: int | None = None
  shots: int | None = None

  def __post_init__(self):
    fraction = self.support_fraction
    if fraction is not None and not 0 < fraction < 1:
      raise ValueError(
          'Expected `support_fraction` between 0 and 1, or None for the train'
          f' part, found {fraction}.'
      )

  def client_ids(
      self, dataset: federated_dataset.FederatedDataset
  ) -> list[str]:
    """Returns who is tested; who has nothing to be tested on is left out."""
    ids = [
        client_id
        for client_id in dataset.client_ids(self.role)
        if dataset.num_examples(client_id, self.part)
    ]
    if self.most is None or self.most >= len(ids):
      return ids
    return [ids[i * len(ids) // self.most] for i in range(self.most)]

  def tasks(
      self, dataset: federated_dataset.FederatedDataset
  ) -> Iterator[ClientTask]:
    """Yields the clients of `client_ids`."""
    for client_id in self.client_ids(dataset):
      client, salt = dataset.client(client_id), dataset.salt(client_id)
      support, query = client.train, getattr(client, self.part)
      if self.support_fraction is not None:
        support, query = _split(query, self.support_fraction, [self.seed, salt])
      if self.shots is not None:
        support = _first_of_every_class(support, self.shots)
      yield ClientTask(client_id, support, query, salt)


def _first_of_every_class(examples, shots):
  labels = [np.flatnonzero(examples.y == y)[:shots] for y in set(examples.y)]
  chosen = np.sort(np.concatenate([np.zeros(0, int), *labels]))
  return corpus_lib.LabelledExamples(examples.x[chosen], examples.y[chosen])


def _split(examples, fraction, seed):
  """Returns floor(fraction * n) random examples and the others."""
  rows = np.random.default_rng(seed).permutation(len(examples.y))
  num_support = int(fraction * len(rows) + 1e-9)  # 0.29 * 100 is 28.99...
  return tuple(
      corpus_lib.LabelledExamples(examples.x[chosen], examples.y[chosen])
      for chosen in np.split(rows, [num_support])
  )


def new_class_tasks(
    pools: groups_lib.ClassPools, protocol: group_evaluation.GroupProtocol
) -> Iterator[ClientTask]:
  """Yields the clients of groups of new classes, group by group.

  Args:
    pools: Images by class.
    protocol: Which groups.

  Yields:
    `protocol.num_clients` clients a group, each with its own support and query.

  Source: Lim et al., MetaVers, WACV 2024, table 6, where a client has all
    classes of its group (deployment 'iid').
  """
  for index in range(protocol.num_groups):
    group = protocol.sample(pools, index)
    asked = np.where(group.query_mask > 0, group.query_clients, -1)
    for k, salt in enumerate(group.salts):
      held, own = group.support_mask[k] > 0, asked == k
      yield ClientTask(
          f'group_{index}_client_{k}',
          corpus_lib.LabelledExamples(
              group.support_x[k][held], group.support_y[k][held]
          ),
          corpus_lib.LabelledExamples(group.query_x[own], group.query_y[own]),
          int(salt),
      )


class ManyExamples(NamedTuple):
  """The examples of several clients, one after the other.

  Attributes:
    x: float32 [N, ...].
    y: int32 [N].
    bounds: int32 [num_clients + 1]; those of client i are the rows from
      `bounds[i]` up to `bounds[i + 1]`.
  """

  x: Any
  y: Any
  bounds: Any

  @classmethod
  def of(cls, parts: Sequence[corpus_lib.LabelledExamples]) -> 'ManyExamples':
    """Returns those of clients' parts, at least one."""
    bounds = np.cumsum([0, *(len(part.y) for part in parts)])
    x, y = map(np.concatenate, zip(*parts, strict=True))
    return cls(x, y, bounds.astype(np.int32))

  def client(self, i: tf.Tensor) -> episodes.Examples:
    """Returns those of client i, none of them padding."""
    rows = slice(self.bounds[i], self.bounds[i + 1])
    y = self.y[rows]
    return episodes.Examples(self.x[rows], y, tf.ones_like(y, tf.float32))


def build_client_test(
    client_personalizer: personalizer_lib.ClientPersonalizer,
    *,
    with_curve: bool = False,
) -> tf.types.experimental.GenericFunction:
  """Builds the traced function that adapts to clients and asks the results.

  It is a loop over clients of any sizes, of which some are computed at the same
  time; what a client answers does not depend on the others.

  Args:
    client_personalizer: What a client does with trained weights.
    with_curve: Whether to ask on the way, too, where the personalizer can. The
      curve's ends are then what was before and after.

  Returns:
    `(weights, bank, memories, supports, queries, seeds) -> (before, after,
    curve, among_own)` for K clients. `bank` is what a personalizer with
    `uses_bank` takes for the memory of each; for others each leaf of `memories`
    has a leading axis `[K, ...]`. `supports` and `queries` are `ManyExamples`,
    `seeds` int32 `[K, 2]`. `before` and `after` are pairs of labels, int32 `[K,
    Q]`, and their `Certainty`, `()` where a personalizer does not tell it;
    `curve` is labels, int32 `[K, num_points, Q]`; `among_own` those after
    adaptation where only classes of the support are possible, int32 `[K, Q]`.
    All are filled up with 0 where a client has fewer than Q queries; all but
    `after` are None where there is no such thing. Without a `start` the first
    point of the curve is what was before. A label that the personalizer has no
    class for is an `InvalidArgumentError`.
  """
  personalizer = client_personalizer
  start, predict = personalizer.start, personalizer.predict
  ask_on_the_way = personalizer.curve if with_curve else None
  has_curve = ask_on_the_way is not None
  has_before = has_curve or start is not None
  specs = certainty.specs(ask_on_the_way or predict)
  has_own = isinstance(ask_on_the_way or predict, personalizer_lib.ByScores)
  curves = tf.TensorSpec([None, None], tf.int32)

  def answers(weights, memory, support, query, seed):
    if personalizer.num_classes is not None:
      query = episodes.refuse_bad_labels(query, personalizer.num_classes)

    def marked(ask, answers):
      return certainty.mark(ask, answers, query.y)

    if ask_on_the_way is not None:
      points = certainty.ask(
          ask_on_the_way, weights, memory, support, query, seed
      )
      before, after = (marked(ask_on_the_way, points[i]) for i in (0, -1))
      return (
          before,
          after,
          certainty.to_labels(ask_on_the_way, points),
          certainty.among_own(ask_on_the_way, points[-1], support),
      )
    before = ()
    if start is not None:
      of_start = start(weights, memory)
      before = marked(predict, certainty.ask(predict, of_start, query))
    adapted = personalizer.adapt(weights, memory, support, seed)
    found = certainty.ask(predict, adapted, query)
    own = certainty.among_own(predict, found, support)
    return before, marked(predict, found), (), own

  @tf.function(autograph=False)
  def client_test(weights, bank, memories, supports, queries, seeds):
    most = tf.reduce_max(queries.bounds[1:] - queries.bounds[:-1])

    def one_client(arguments):
      i, memory, seed = arguments
      memory = bank if personalizer.uses_bank else memory
      query = queries.client(i)
      own = answers(weights, memory, supports.client(i), query, seed)
      missing = most - tf.shape(query.y)[0]
      return tf.nest.map_structure(
          lambda given: tf.pad(
              given, [[0, 0]] * (given.shape.rank - 1) + [[0, missing]]
          ),
          own,
      )

    before, after, curve, own = tf.map_fn(
        one_client,
        (tf.range(tf.shape(seeds)[0]), memories, seeds),
        fn_output_signature=(
            specs if has_before else (),
            specs,
            curves if has_curve else (),
            specs[0] if has_own else (),
        ),
        parallel_iterations=machine.PARALLEL,
    )
    return (
        before if has_before else None,
        after,
        curve if has_curve else None,
        own if has_own else None,
    )

  return client_test


def ask_clients(
    client_test: tf.types.experimental.GenericFunction,
    weights: Any,
    memories: Sequence[Any],
    tasks: Sequence[ClientTask],
    *,
    seed: int,
    bank: Any = (),
) -> list[client_metrics.Answers]:
  """Adapts to clients and asks each for the labels of its query.

  Args:
    client_test: From `build_client_test`; reuse it, it is traced once.
    weights: Trained weights, `OrderedDict(body, head)`.
    memories: What the personalizer takes for each client's `memory`; `()` for
      each with a bank.
    tasks: The clients, at least one.
    seed: Of the adaptation; each client's salt is added to it.
    bank: What a personalizer with `uses_bank` takes.

  Returns:
    The answers of each client, which do not depend on the others.
  """
  calls = [(tasks, _arguments(memories, tasks, seed))]
  (answers,) = _all_answers(client_test, weights, bank, calls)
  return answers


def _arguments(memories, tasks, seed) -> tuple[Any, ...]:
  """The arguments of `client_test` that are the clients' own."""
  return tf.nest.map_structure(
      tf.convert_to_tensor,
      (
          tf.nest.map_structure(lambda *leaves: np.stack(leaves), *memories),
          ManyExamples.of([task.support for task in tasks]),
          ManyExamples.of([task.query for task in tasks]),
          np.array([[seed, task.salt] for task in tasks], np.int32),
      ),
  )


def _all_answers(
    client_test, weights, bank, calls
) -> Iterator[list[client_metrics.Answers]]:
  """Yields the answers of the clients of every call.

  Args:
    client_test: As for `ask_clients`.
    weights: As for `ask_clients`.
    bank: As for `ask_clients`.
    calls: The clients of every call, and `_arguments`.
  """
  shared = tf.nest.map_structure(tf.convert_to_tensor, (weights, bank))
  results = dealing.call_all(client_test, _any_number, shared, calls)
  for tasks, result in results:
    before, after, curve, among_own = tf.nest.map_structure(
        lambda part: None if part is None else np.asarray(part), result
    )
    answers = []
    for i, task in enumerate(tasks):

      def own(part, i=i, task=task):
        return None if part is None else part[i, ..., : len(task.query.y)]

      of_start, how_sure = tf.nest.map_structure(own, before) or (None, ())
      answers.append(
          client_metrics.Answers(
              id=task.client_id,
              num_support=len(task.support.y),
              labels=task.query.y,
              before=of_start,
              after=own(after[0]),
              curve=own(curve),
              certainty_before=how_sure or None,
              certainty=tf.nest.map_structure(own, after[1]) or None,
              among_own=own(among_own),
          )
      )
    yield answers


def _any_number(shared, arguments):
  """Returns what is to be traced: any number of clients, rows and memories."""
  (weights, *of_clients) = tf.nest.map_structure(
      tf.TensorSpec.from_tensor, (*shared, *arguments)
  )
  of_clients = tf.nest.map_structure(
      lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype),
      of_clients,
  )
  return weights, *of_clients


def evaluate_clients(
    client_test: tf.types.experimental.GenericFunction,
    weights: Any,
    memory_of: Callable[[str], Any],
    tasks: Iterable[ClientTask],
    *,
    seed: int,
    bank: Any = (),
    restrict_f1: bool = False,
    num_tasks: int | None = None,
) -> client_metrics.Report:
  """Adapts to each client and tests it.

  Args:
    client_test: As for `ask_clients`.
    weights: As for `ask_clients`.
    memory_of: Client id -> what the personalizer takes for its `memory`.
    tasks: The clients.
    seed: As for `ask_clients`.
    bank: As for `ask_clients`.
    restrict_f1: See `client_metrics.macro_f1`.
    num_tasks: How many clients there are, to tell how far it is; None if nobody
      knows.

  Returns:
    The report of every client.

  Raises:
    ValueError: If there is no client.
  """
  clients = ((memory_of(task.client_id), task) for task in tasks)

  def calls():
    for together in group_evaluation.batches(clients):
      memories, own = zip(*together, strict=True)
      yield own, _arguments(memories, own, seed)

  answers: list[client_metrics.Answers] = []
  with progress.Progress(
      'clients tested', num_tasks, 'clients', first=group_evaluation.TRACED
  ) as shown:
    for found in _all_answers(client_test, weights, bank, calls()):
      answers += found
      shown.update(len(answers))
  if not answers:
    raise ValueError(
        'Expected clients with examples to be tested on, found none. Tip: hold'
        ' some out when the data set is partitioned.'
    )
  return client_metrics.report(answers, restrict_f1=restrict_f1)
