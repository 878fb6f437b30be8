"""Clients that keep a head of their own from round to round, step by step.

What a client keeps goes into a store, here in memory, and never to the server.
"""

from tff_meta import datasets
from tff_meta import method
from tff_meta import models
from tff_meta import registry
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.evaluation import clients as client_evaluation
from tff_meta.execution import in_process
from tff_meta.training import client_memories
from tff_meta.training import client_state_store
from tff_meta.training import loop


def main(rounds: int = 50) -> tuple[int, float]:
  """Returns how many clients remember something, and their accuracy."""
  in_process.set_in_process_context()
  clients = federated_dataset.FederatedDataset.from_corpus(
      datasets.load_corpus('digits'), partitioners.shards, 20, seed=0
  )
  spec = registry.get('fed_per')
  model = models.build('mlp', clients.input_shape, None)
  fed_per = spec.method(model, spec.presets['demo'], clients.num_classes)
  process = method.build_process(fed_per, model, seed=0)

  store = client_state_store.InMemoryStore()
  state = process.initialize()
  for round_num in range(1, rounds + 1):
    cohort = clients.client_ids()[round_num % 4 :: 4]
    data = [(c, clients.tff_client_data(c)) for c in cohort]
    # Each gets what it kept, and what it keeps now is written to the store.
    state = loop.next_round(process, state, round_num, data, store).state
    store.commit({round_num})

  memories = client_memories.ClientMemories(process, store)
  report = client_evaluation.evaluate_clients(
      client_evaluation.build_client_test(fed_per.known_client()),
      process.get_model_weights(state).trainable,
      memories.of,
      client_evaluation.ClientProtocol(
          'meta_train', 'test', None, seed=0
      ).tasks(clients),
      seed=0,
  )
  return len(store.client_ids()), report.accuracy.mean


if __name__ == '__main__':
  num_clients, accuracy = main()
  print(f'{num_clients} clients remember; {100 * accuracy:.1f} % right')
