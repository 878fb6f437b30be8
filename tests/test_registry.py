"""The list of algorithms."""

import ast
import copy
import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf

import tff_meta
from tff_meta import configurations
from tff_meta import episodes
from tff_meta import models
from tff_meta import registry
from tff_meta.algorithms import frl

SPECS = registry.ALGORITHMS.values()
# These name recipes and networks after papers, and see neither an algorithm nor
# its configuration.
_NAMED_AFTER_PAPERS = ('data', 'datasets', 'models')
_ENGLISH = {'local'}  # No name but as a whole string, or imported.


def test_names():
  assert {'frl', 'fed_avg', 'fed_avg_ft', 'personalized_fl'} <= set(
      registry.ALGORITHMS
  )
  for name, spec in registry.ALGORITHMS.items():
    assert registry.get(name) is spec and spec.name == name


def test_an_unknown_name_lists_the_known_ones():
  with pytest.raises(ValueError, match="frl, metavers, .*found 'frll'"):
    registry.get('frll')


def _network(spec):
  return models.build(spec.model or 'mlp', (28, 28, 1), None)


@pytest.mark.parametrize('spec', SPECS, ids=lambda spec: spec.name)
def test_what_is_named_is_there(spec):
  assert set(spec.presets) == {'paper', 'release', 'demo'}
  types = {type(preset) for preset in spec.presets.values()}
  assert len(types) == 1
  assert issubclass(types.pop(), configurations.Configuration)
  named = {
      spec.cohort_rounds_field,
      spec.group_rounds_field,
      spec.kept_clients_field,
      spec.num_clients_field,
      *spec.run_settings.values(),
  }
  assert named - {None} <= set(spec.hparam_names())
  assert set(spec.starts_from_scratch) <= set(spec.uses) <= set(registry.USES)
  assert spec.summary and '20' in spec.paper
  made = spec.method(_network(spec), spec.presets['paper'], num_classes=3)
  # All that a method has is said in its module's first use, or by a variant.
  for use in registry.USES:
    assert (getattr(made, use) is not None) == (use in spec.uses)
    if use in spec.uses:
      has_bank = getattr(getattr(made, use)(), 'uses_bank', False)
      assert has_bank == (use in spec.gives_memories_to)


def test_only_networks_of_this_library_are_taken():
  with pytest.raises(TypeError, match='Expected `model` .* found a object'):
    registry.build('frl', object(), 'demo', num_classes=3)


def test_what_an_algorithm_from_outside_lacks_is_named():
  spec = dataclasses.replace(
      registry.get('frl'), uses=('group', 'known_client')
  )
  network = models.build('mlp', (8, 8, 1), None)
  with pytest.raises(ValueError, match='has group, found group, kno'):
    spec.method(network, frl.PAPER, num_classes=3)
  elsewhere = dataclasses.replace(spec, module_name='tff_meta.configurations')
  with pytest.raises(ValueError, match='`PAPER` in tff_meta.configurations'):
    print(elsewhere.presets)


def test_uses_and_channels_are_as_the_method_has_them():
  with pytest.raises(ValueError, match='among known_client, .* found new_cl'):
    dataclasses.replace(registry.get('frl'), uses=('new_clients',))
  network = models.build('mlp', (8, 8, 1), None)
  spec = dataclasses.replace(registry.get('frl'), uses=())
  with pytest.raises(ValueError, match='`Method` has group, found none'):
    spec.method(network, frl.PAPER, num_classes=3)
  spec = dataclasses.replace(registry.get('frl'), channels=None)
  with pytest.raises(ValueError, match="declares them, 'class protot.*None"):
    spec.method(network, frl.PAPER, num_classes=3)


@pytest.mark.parametrize(
    'spec', [s for s in SPECS if s.function], ids=lambda spec: spec.name
)
def test_a_variant_for_another_use_trains_the_same(spec):
  """So that contracts need train one of a module."""
  module = spec.module_name.rpartition('.')[2]
  one, other = (
      s.method(_network(s), spec.presets['paper'], num_classes=3)
      for s in (spec, registry.get(module))
  )
  assert one.client_update.__code__ is other.client_update.__code__
  assert one.channels == other.channels or len(one.channels) == 1


@pytest.mark.parametrize(
    'spec', [s for s in SPECS if s.unused_fields], ids=lambda spec: spec.name
)
def test_fields_without_effect_are_not_read(spec):
  preset = spec.presets['paper']
  assert set(spec.unused_fields) <= set(spec.hparam_names())

  class Refusing(type(preset)):

    def __getattribute__(self, name):
      assert name not in spec.unused_fields
      return super().__getattribute__(name)

  config = copy.copy(preset)
  object.__setattr__(config, '__class__', Refusing)
  network = _network(spec)
  registry.build(spec.name, network, config, num_classes=3)
  method = spec.method(network, config, num_classes=3)
  weights = method.initialize(tf.constant([1, 2]))
  examples = episodes.Examples(
      tf.zeros([4, 28, 28, 1]), tf.constant([0, 1, 2, 0]), tf.ones([4])
  )
  use = method.known_client if method.memory is None else method.new_client
  use().adapt(weights, (), examples, tf.constant([3, 4]))
  if method.group is not None:
    method.group()
  assert spec.without_effect(['epochs', *spec.unused_fields]) == [
      *spec.unused_fields
  ]
  if spec.changes:  # With one of them it may be another variant.
    assert not spec.without_effect([*spec.changes, *spec.unused_fields])


def test_a_preset_that_is_none_is_named():
  network = models.build('mlp', (8, 8, 1), None)
  with pytest.raises(ValueError, match="preset of paper, .* found 'dmeo'"):
    registry.build('frl', network, 'dmeo', num_classes=3)


def test_a_variant_changes_every_preset():
  for spec in SPECS:
    for preset in spec.presets.values():
      for name, value in spec.changes.items():
        assert getattr(preset, name) == value
  assert (
      registry.get('fedec_l2').changes and registry.get('fedec').changes == {}
  )


def test_rounds_of_a_cohort():
  """R + 1 = 4 rounds for FRL; one for all others."""
  for spec in SPECS:
    for preset in spec.presets.values():
      expected = 4 if spec.name == 'frl' else 1
      assert spec.rounds_per_cohort(preset) == expected
  config = dataclasses.replace(frl.PAPER, rounds=0)
  assert registry.get('frl').rounds_per_cohort(config) == 1


@pytest.mark.parametrize(
    'spec', registry.ALGORITHMS.values(), ids=lambda s: s.name
)
def test_hyperparameters_names_are_those_of_the_configuration(spec):
  fields = dataclasses.fields(spec.presets['paper'])
  assert spec.hparam_names() == tuple(f.name for f in fields)


@pytest.mark.parametrize(
    'source, is_imported',
    [
        (
            'import dataclasses\n\n@dataclasses.dataclass(frozen=True)\n'
            'class Config:\n  mu: float = 0.1\n  epochs: int = 1\n\n'
            'PAPER = Config()\nassert False',
            False,
        ),
        (
            'import dataclasses\n\n'
            'PAPER = dataclasses.make_dataclass("C", ["mu", "epochs"])(1, 2)',
            True,
        ),
        (
            'import dataclasses\nfrom tff_meta import configurations as c\n\n'
            '@dataclasses.dataclass(frozen=True)\n'
            'class Config(c.Configuration):\n  mu: float = 0.1\n'
            '  KIND: "ClassVar[str]" = ""\n  epochs: int = 1\n\n'
            'PAPER = RELEASE = Config()\nassert False',
            False,
        ),
        (
            'import dataclasses\nfrom their_base import Base\n\n'
            '@dataclasses.dataclass(frozen=True)\nclass Config(Base):\n'
            '  epochs: int = 1\n\nPAPER = Config()',
            True,
        ),
    ],
)
def test_hyperparameters_of_a_module_from_outside(
    tmp_path, monkeypatch, source, is_imported
):
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'their_module', raising=False)
  (tmp_path / 'their_module.py').write_text(source)
  (tmp_path / 'their_base.py').write_text(
      'import dataclasses\n\n@dataclasses.dataclass(frozen=True)\n'
      'class Base:\n  mu: float = 0.1\n'
  )
  spec = dataclasses.replace(
      registry.get('fed_avg'), module_name='their_module'
  )
  assert spec.hparam_names() == ('mu', 'epochs')
  assert (sys.modules.pop('their_module', None) is not None) == is_imported
  sys.modules.pop('their_base', None)


def test_hyperparameters_of_a_package_with_relative_imports(
    tmp_path, monkeypatch
):
  (tmp_path / 'relative_package').mkdir()
  (tmp_path / 'relative_package/__init__.py').touch()
  (tmp_path / 'relative_package/base.py').write_text('class B:\n  mu: int = 1')
  (tmp_path / 'relative_package/own.py').write_text(
      'from . import base\n\nclass C(base.B):\n  nu: int = 1\n\nPAPER = C()'
  )
  monkeypatch.syspath_prepend(tmp_path)
  spec = registry.AlgorithmSpec('own', 'Own.', '2026', 'relative_package.own')
  assert spec.hparam_names() == ('mu', 'nu')
  assert 'relative_package.own' not in sys.modules
  sys.modules.pop('relative_package')


def test_a_configuration_is_checked_without_tensorflow():
  code = (
      'import sys; from tff_meta.training import run_config;'
      ' assert "tensorflow" not in sys.modules'
  )
  subprocess.run([sys.executable, '-c', code], check=True)


def test_listing_imports_neither_tensorflow_nor_an_algorithm():
  code = (
      'import sys; from tff_meta import registry;'
      ' [spec.hparam_names() for spec in registry.ALGORITHMS.values()];'
      " print(sorted(m for m in sys.modules if m.startswith(('tensorflow',"
      " 'tff_meta.')) and m != 'tff_meta.installation'))"
  )
  done = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  # Of the algorithms' packages nothing but the docstrings.
  assert done.stdout.strip() == (
      "['tff_meta.algorithms', 'tff_meta.baselines', 'tff_meta.catalog',"
      " 'tff_meta.registry', 'tff_meta.spelling']"
  )


def _names_in(path):
  """Names of algorithms in the code of a file, without its docstrings."""
  root = pathlib.Path(tff_meta.__file__).parent
  module = '.'.join(path.relative_to(root.parent).with_suffix('').parts)
  own = [spec.name for spec in SPECS if spec.module_name == module]
  tree = ast.parse(path.read_text(encoding='utf-8'))
  docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
  names = '|'.join(sorted(registry.ALGORITHMS.keys() - own, key=len)[::-1])
  for node in ast.walk(tree):
    is_whole = False
    match node:
      case ast.Constant(str(text)) if id(node) not in docs:
        is_whole = True
      case ast.ImportFrom(module=str(package), names=aliases):
        is_whole = package.endswith(('.algorithms', '.baselines'))
        text = ' '.join(alias.name for alias in aliases)
      case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
        pass
      case ast.Name(text) | ast.Attribute(attr=text) | ast.arg(text):
        pass
      case ast.keyword(str(text)):
        pass
      case ast.Import(aliases):
        text = ' '.join(alias.name for alias in aliases)
      case _:
        continue
    for name in own:  # `cafeme_fed_rep` does not name `fed_rep`.
      text = re.sub(name, '', text, flags=re.IGNORECASE)
    for name in re.findall(
        rf'(?<![a-z0-9])({names})(?![a-z0-9])', text, re.IGNORECASE
    ):
      place = str(path.relative_to(root))
      if _OTHER_MEANINGS.get(place) == name:
        continue
      if name.lower() not in _ENGLISH or (is_whole and name == text):
        yield f'{path.relative_to(root)}:{node.lineno}: {name}'


# Ray's word for a cluster of one's own machine.
_OTHER_MEANINGS = {'execution/ray_pool.py': 'local'}


def test_an_algorithm_is_named_in_its_own_file_and_here_alone():
  """What others have to know of it is a field of its `AlgorithmSpec`."""
  root = pathlib.Path(tff_meta.__file__).parent
  found = []
  for path in root.rglob('*.py'):
    if path.relative_to(root).parts[0] not in (
        *_NAMED_AFTER_PAPERS,
        'registry.py',
    ):
      found += _names_in(path)
  assert not found
