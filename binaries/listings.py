"""What `--list` shows: all there is of a kind, and options of each."""

from collections.abc import Callable, Mapping
import dataclasses
import textwrap

from binaries import command_line
from tff_meta import aggregation
from tff_meta import datasets
from tff_meta import installation
from tff_meta import models
from tff_meta import registry
from tff_meta.data import partitioners
from tff_meta.training import hyperparameters
from tff_meta.training import protocol_names

_WIDTH = 18


def show(kind: str) -> None:
  """Prints what there is.

  Args:
    kind: One of `KINDS`, or `'all'` for algorithms and data sets, briefly.
  """
  if kind != 'all':
    _SHOW[kind]()
    return
  _show_algorithms()
  print('\nData sets (--dataset)')
  for dataset in datasets.DATASETS.values():
    _print_line(dataset.name, dataset.description)
  print('\nData of your own (--dataset)')
  for name, meaning in datasets.OWN_KINDS.items():
    _print_line(name, meaning)
  print(f'\nMore, with options: --list={"|".join(KINDS)}')


def show_hparams(algorithm: str) -> None:
  """Prints the names that --hparams takes, what they mean, and presets.

  Args:
    algorithm: A name in `registry.ALGORITHMS`.
  """
  spec = registry.get(algorithm)
  command_line.announce(f'Reading the presets of {algorithm}.')
  installation.import_tff()
  presets = spec.presets
  meanings = hyperparameters.meanings(type(presets['paper']))
  print(f'What --hparams=name=value,... can change of {algorithm}')
  for name, meaning in meanings.items():
    print(f'  {name}: {meaning}' if meaning else f'  {name}')
  print('\nPresets (--preset)')
  for field in dataclasses.fields(presets['paper']):
    values = {p: getattr(config, field.name) for p, config in presets.items()}
    if len(set(values.values())) == 1:
      shown = values['paper']
    else:
      shown = ', '.join(f'{preset} {value}' for preset, value in values.items())
    print(f'  {field.name}: {shown}')


def _print_line(name: str, meaning: str) -> None:
  print(f'  {name:{_WIDTH - 1}} {meaning}')


def _print_options(options: Mapping[str, str]) -> None:
  """Prints options below what they are of."""
  for option, meaning in options.items():
    lines = ' '.join(meaning.split())
    print(
        textwrap.fill(
            f'{option}: {lines}' if lines else option,
            80,
            initial_indent=' ' * 6,
            subsequent_indent=' ' * 10,
            break_long_words=False,
        )
    )


def _show_algorithms() -> None:
  print('Algorithms (--algorithm; --list --algorithm=NAME shows --hparams)')
  for spec in registry.ALGORITHMS.values():
    _print_line(spec.name, f'{spec.summary} ({spec.paper})')


def _show_datasets() -> None:
  print('Data sets (--dataset), and what --dataset_options can change of each')
  for dataset in datasets.DATASETS.values():
    _print_line(dataset.name, dataset.description)
    _print_options(hyperparameters.option_meanings(dataset.load, 2))
  for name, meaning in datasets.OWN_KINDS.items():
    _print_line(name, meaning)
    load = datasets.get(name).load
    _print_options(hyperparameters.option_meanings(load, 2))


def _show_models() -> None:
  print('Networks (--model)')
  for name in models.MODELS:
    _print_line(name, models.summary(name))
  _print_line(
      'MODULE:FUNCTION',
      'of your own, (input_shape, num_classes) -> Model or Keras model',
  )


def _show_partitions() -> None:
  print('Partitions (--partition), and what --partition_options can change')
  _print_line(
      partitioners.FEW_ROUND, 'Of meta-train classes, two shards a client.'
  )
  _print_options({'examples_per_class=...': 'Images of a class; none for all.'})
  for name, partitioner in partitioners.PARTITIONERS.items():
    _print_line(name, (partitioner.__doc__ or '').strip().partition('\n')[0])
    _print_options(hyperparameters.option_meanings(partitioner, 3))


def _show_protocols() -> None:
  print('Protocols (--protocol): who is tested')
  for name, meaning in protocol_names.MEANINGS.items():
    _print_line(name, meaning)
  _print_line(protocol_names.NONE, 'nobody')


def _show_aggregations() -> None:
  print('Aggregations (--aggregation): of everything that clients send')
  for name, kind in aggregation.BY_NAME.items():
    _print_line(name, (kind.__doc__ or '').strip().partition('\n')[0])
    told = hyperparameters.meanings(kind)
    _print_options(
        {
            f'{f.name}={f.default}': told[f.name]
            for f in dataclasses.fields(kind)
        }
    )


def _show_experiments() -> None:
  from binaries import experiments  # Reads all tables.

  print('Experiments (--experiment of binaries.compare)')
  for table in experiments.TABLES.values():
    print(f'  {table.name}\n      {table.title} ({table.source})')
    print(f'      --scale={"|".join(table.scales)}')


_SHOW: dict[str, Callable[[], None]] = {
    'algorithms': _show_algorithms,
    'datasets': _show_datasets,
    'models': _show_models,
    'partitions': _show_partitions,
    'protocols': _show_protocols,
    'aggregations': _show_aggregations,
    'experiments': _show_experiments,
}
KINDS = tuple(_SHOW)
