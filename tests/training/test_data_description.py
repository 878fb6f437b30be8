"""What clients hold, as a table and a picture."""

import numpy as np
from PIL import Image

from tff_meta.data import corpus as corpus_lib
from tff_meta.data import federated_dataset
from tff_meta.data import partitioners
from tff_meta.training import data_description


def _dataset(num_classes, num_clients, names=None):
  y = np.repeat(np.arange(num_classes, dtype=np.int32), 4)
  clients = np.arange(len(y)) // 3 % num_clients
  examples = corpus_lib.LabelledExamples(np.zeros((len(y), 2), np.float32), y)
  corpus = corpus_lib.Corpus(
      'theirs',
      examples,
      corpus_lib.LabelledExamples(examples.x[:0], y[:0]),
      num_classes,
      np.float32,
      writers=np.array([f'c{c}\n' for c in clients]),
      class_names=names,
      writers_name_clients=True,
  )
  return federated_dataset.FederatedDataset.from_corpus(
      corpus,
      partitioners.by_writer,
      num_clients,
      0,
      partition_by='writer',
      test_fraction=0.5,
      num_test_clients=1,
  )


def test_every_client_is_counted(tmp_path):
  description = data_description.describe(_dataset(3, 2, ('a', 'b', 'c')))
  lines = description.to_text().splitlines()
  assert lines[0] == 'theirs: 2 clients, 3 classes, 12 examples of 2'
  assert lines[1].split() == 'client for train validation test a b c'.split()
  # Rows 0-2 and 6-8 are of one client, 3-5 and 9-11 of the other.
  counts = {line.split()[0]: line.split()[2:] for line in lines[2:4]}
  assert counts == {
      'c0?': ['3', '0', '3', '3', '2', '1'],
      'c1?': ['3', '0', '3', '1', '2', '3'],
  }
  assert sorted(line.split()[1] for line in lines[2:4]) == ['new', 'train']
  assert lines[4].split() == ['all', '6', '0', '6', '4', '4', '4']
  path = tmp_path / 'data.png'
  description.write_picture(path)
  assert min(Image.open(path).size) > 100


def test_of_many_classes_and_clients_the_largest_are_told():
  description = data_description.describe(_dataset(90, 60))
  lines = description.to_text().splitlines()
  assert lines[1].endswith('classes  largest class')
  assert len(lines) == 1 + 1 + 40 + 1 + 1 + 1 and '... 20 more' in lines[42]
  assert lines[43].split() == ['all', '180', '0', '180', '90', '0', '(4)']
