"""TFF's computations of a run as files, which need tff_meta no more.

The folder `computations` of a bundle has, serialized as TFF does it (`.pb`):
`initialize`, `next`, `get_model_weights`, `memory` (what clients keep, where
they keep something), `next_on_tensors`, whose clients hold tensors in the place
of sequences, and in folders the components of the forms that production
systems run (`map_reduce`, `distribute_aggregate`, and `memory_broadcast` for
what clients keep). `types.txt` has their type signatures, `data.json` what an
example store must deliver for each sequence. `round` has a round: the state
before, which is that of the run, and after, the metrics, and what its clients
held, who are made up, as arrays by path.
"""

import collections
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import composition
from tff_meta.bundles import replay
from tff_meta.execution import native
from tff_meta.training import checkpoints

# Of the recorded round: enough for an episode of any preset.
_CLIENTS, _EXAMPLES = 3, 100

_MEANINGS = {
    'examples': (
        'All training examples of the client, in batches of any sizes, each'
        ' example once; x preprocessed as in training.'
    ),
    'salt': (
        'One number that is the same in all rounds and that no other client'
        ' has: it makes the random numbers of the client its own.'
    ),
    'memory': (
        'What the client kept when it took part last, an element of `memory`;'
        ' nothing before its first round. It never leaves the client.'
    ),
}


class Trained(NamedTuple):
  """What a run has come to, as its computations have it.

  Attributes:
    process: The training process.
    state: The server's state.
    input_shape: Of an example.
    num_classes: Labels are 0..num_classes-1.
  """

  process: tff.learning.templates.LearningProcess
  state: Any
  input_shape: tuple[int, ...]
  num_classes: int


def write(
    folder: pathlib.Path, trained: Trained, with_distribute_aggregate: bool
) -> dict[str, Any]:
  """Writes the computations of a process, and a round that they do.

  The clients of the round are made up, so that nothing of real ones leaves with
  a bundle.

  Args:
    folder: Where to; made here.
    trained: What the run has come to.
    with_distribute_aggregate: Whether TFF converts the process to a
      DistributeAggregateForm.

  Returns:
    The entry of the manifest, JSON values.

  Raises:
    ValueError: If TFF does not convert it, although it should.
  """
  process = trained.process
  folder.mkdir()
  computations: dict[str, Any] = {
      'initialize': process.initialize,
      'next': process.next,
      'get_model_weights': process.get_model_weights,
      'next_on_tensors': on_tensors(process.next),
  }
  forms = tff.backends.mapreduce
  components = {
      'map_reduce': forms.get_map_reduce_form_for_computation(process.next)
  }
  if with_distribute_aggregate:
    try:
      components['distribute_aggregate'] = (
          forms.get_distribute_aggregate_form_for_computation(process.next)
      )
    except ValueError as error:
      raise ValueError(
          'Expected an aggregation whose rounds TFF turns into a'
          ' DistributeAggregateForm, found one that it refuses, as it refuses'
          ' encoded sums. Tip: say `has_distribute_aggregate_form = False` in'
          ' its class.'
      ) from error
  if isinstance(process, composition.StatefulLearningProcess):
    computations['memory'] = memory(process)
    components['memory_broadcast'] = forms.get_broadcast_form_for_computation(
        computations['memory']
    )
  for form, found in components.items():
    (folder / form).mkdir()
    for name, part in sorted(vars(found).items()):
      if isinstance(part, tff.Computation):
        computations[f'{form}/{name.strip("_")}'] = part
  for name, computation in computations.items():
    proto = tff.framework.serialize_computation(computation)
    (folder / f'{name}.pb').write_bytes(proto.SerializeToString())
  data_kind = process.next.type_signature.parameter[1].member
  (folder / 'types.txt').write_text(
      ''.join(
          f'{name}: {computation.type_signature.compact_representation()}\n'
          for name, computation in computations.items()
      )
  )
  (folder / 'data.json').write_text(
      json.dumps(_data(data_kind), indent=2, sort_keys=True) + '\n'
  )
  _write_round(folder / replay.ROUND, trained)
  return {'names': sorted(computations), 'forms': sorted(components)}


def memory(process: composition.StatefulLearningProcess) -> tff.Computation:
  """Returns what clients keep after a round, `(state, data) -> memory`.

  With the server's state and the clients' data as `process.next` takes them,
  and a `ClientMemory` at CLIENTS.
  """

  @tff.federated_computation(*process.next_with_memory.type_signature.parameter)
  def what_clients_keep(state, data):
    _, kept = process.next_with_memory(state, data)
    return kept

  return what_clients_keep


def on_tensors(next_computation: tff.Computation) -> tff.Computation:
  """Returns `next` for clients that hold tensors in the place of sequences.

  Data sources of trusted execution environments deliver these. A client has
  `examples`, `<x, y>` of all its examples; `salt`; and, where clients keep
  something, `memory` with `present` and `value`, zeros where it has none.

  Args:
    next_computation: `(state, data) -> LearningProcessOutput`.
  """
  state_kind, data_kind = next_computation.type_signature.parameter
  sequences = dict(replay.fields(data_kind.member))
  kind = {name: sequence.element for name, sequence in sequences.items()}
  if 'memory' in kind:
    kind['memory'] = collections.OrderedDict(
        present=np.bool_, value=kind['memory']
    )

  @tff.tensorflow.computation(collections.OrderedDict(kind))
  def to_sequences(tensors):
    data = collections.OrderedDict()
    for name in sequences:
      value = tensors[name]
      if name == 'memory':
        count = tf.cast(value['present'], tf.int64)
        data[name] = tf.data.Dataset.from_tensors(value['value']).take(count)
      else:
        data[name] = tf.data.Dataset.from_tensors(value)
    return data

  @tff.federated_computation(
      state_kind,
      tff.FederatedType(to_sequences.type_signature.parameter, tff.CLIENTS),
  )
  def next_on_tensors(state, clients):
    return next_computation(state, tff.federated_map(to_sequences, clients))

  return next_on_tensors


def _data(kind: tff.StructType) -> dict[str, Any]:
  """Returns what has to be delivered for each sequence."""
  return {
      name: {
          'meaning': _MEANINGS[name],
          'elements': {
              path: {
                  'dtype': np.dtype(leaf.dtype).name,
                  'shape': list(leaf.shape),
              }
              for path, leaf in replay.leaves(sequence.element)
          },
      }
      for name, sequence in replay.fields(kind)
  }


def _write_round(folder, trained) -> None:
  """Does a round, and writes it as it was before and after."""
  folder.mkdir()
  clients = [_made_up_client(trained, number) for number in range(_CLIENTS)]
  data_kind = trained.process.next.type_signature.parameter[1].member
  held = [replay.to_sequences(data_kind, arrays) for arrays in clients]
  # In TFF's own runtime, as `replay` runs it: of gradients that are rounding
  # errors alone, which other kernels have otherwise, Adam makes whole steps.
  context = native.create_native_context()
  with tff.framework.get_context_stack().install(context):
    output = trained.process.next(trained.state, held)
  for name, structure in (
      ('state', trained.state),
      ('state_after', output.state),
      ('metrics_after', output.metrics),
  ):
    np.savez(folder / f'{name}.npz', **checkpoints.to_arrays(structure))
  for number, arrays in enumerate(clients):
    np.savez_compressed(folder / f'client_{number}.npz', **arrays)


def _made_up_client(trained, number) -> dict[str, np.ndarray]:
  """Returns what a client holds, as tensors by path.

  It has examples of two classes; all but the first have what a client keeps at
  first, where clients keep something.
  """
  rng = np.random.default_rng(number)
  y = (number + np.arange(_EXAMPLES) % 2) % trained.num_classes
  x = rng.integers(-4, 5, [_EXAMPLES, *trained.input_shape]) / 4
  arrays = {
      'examples/x': x.astype(np.float32),
      'examples/y': y.astype(np.int32),
      'salt': np.int32(number),
  }
  if isinstance(trained.process, composition.StatefulLearningProcess):
    arrays['memory/present'] = np.bool_(number > 0)
    kept = checkpoints.to_arrays(trained.process.initial_memory)
    arrays |= {f'memory/value/{p}'.rstrip('/'): a for p, a in kept.items()}
  return arrays
