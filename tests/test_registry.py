"""The list of algorithms."""

import ast
import dataclasses
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import tff_meta
from tff_meta import registry
from tff_meta.algorithms import frl
from tff_meta.baselines import fed_avg
from tff_meta.baselines import personalized_fl

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


@pytest.mark.parametrize('spec', SPECS, ids=lambda spec: spec.name)
def test_what_is_named_is_there(spec):
  """Every callable takes the model and the configuration, then keywords."""
  assert set(spec.presets) == {'paper', 'release', 'demo'}
  types = {type(preset) for preset in spec.presets.values()}
  assert len(types) == 1 and dataclasses.is_dataclass(types.pop())
  for callable_, keyword in (
      (spec.build, 'num_classes'),
      (spec.build_group_personalizer, 'way'),
      (spec.build_known_client_personalizer, 'num_classes'),
      (spec.build_new_client_personalizer, 'num_classes'),
      (spec.build_new_class_personalizer, 'num_classes'),
  ):
    if callable_ is not None:
      parameters = list(inspect.signature(callable_).parameters)
      assert parameters[:3] == ['model', 'config', keyword]
  assert spec.build is not None
  assert (
      spec.build_group_personalizer is not None
      or spec.build_known_client_personalizer is not None
  )
  assert spec.summary and '20' in spec.paper


@pytest.mark.parametrize('spec', SPECS, ids=lambda spec: spec.name)
def test_what_others_read_of_an_algorithm_is_there(spec):
  fields = {
      spec.cohort_rounds_field,
      spec.group_rounds_field,
      spec.kept_clients_field,
      spec.num_clients_field,
      *spec.run_settings.values(),
  }
  assert fields - {None} <= set(spec.hparam_names())
  for use in spec.starts_from_scratch:
    assert getattr(spec, f'build_{use}_personalizer') is not None
  for build in (spec.build_client_network, spec.build_gpal_rounds):
    if build is not None:
      parameters = list(inspect.signature(build).parameters)
      assert parameters[:2] == ['model', 'config'] and len(parameters) == 3


def test_the_right_ones():
  frl_spec = registry.get('frl')
  assert frl_spec.build.__wrapped__ is frl.build_frl
  assert frl_spec.build_known_client_personalizer is None
  assert frl_spec.build_new_client_personalizer is None
  assert frl_spec.build_new_class_personalizer is None
  assert frl_spec.presets == {
      'paper': frl.PAPER,
      'release': frl.RELEASE,
      'demo': frl.DEMO,
  }
  plain, tuned = registry.get('fed_avg'), registry.get('fed_avg_ft')
  assert plain.build is tuned.build
  assert plain.build.__wrapped__ is fed_avg.build_fed_avg
  assert plain.build_group_personalizer.__wrapped__.__wrapped__ is (
      fed_avg.build_from_scratch_group_personalizer
  )
  assert tuned.build_group_personalizer.__wrapped__.__wrapped__ is (
      fed_avg.build_fine_tuning_group_personalizer
  )
  for kind in ('known', 'new'):
    name = f'build_{kind}_client_personalizer'
    for spec, kind_of in ((plain, 'global'), (tuned, 'fine_tuning')):
      builder = getattr(fed_avg, f'build_{kind_of}_client_personalizer')
      assert getattr(spec, name).__wrapped__.__wrapped__ is builder
  personalized = registry.get('personalized_fl')
  assert personalized.build.__wrapped__ is personalized_fl.build_personalized_fl


@pytest.mark.parametrize('spec', SPECS, ids=lambda spec: spec.name)
def test_only_networks_of_this_library_are_taken(spec):
  for builder in (
      spec.build,
      spec.build_group_personalizer,
      spec.build_known_client_personalizer,
      spec.build_new_client_personalizer,
      spec.build_new_class_personalizer,
  ):
    if builder is not None:
      with pytest.raises(TypeError, match='Expected `model` .* found a object'):
        builder(object(), spec.presets['demo'], num_classes=3, seed=0)


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
      "['tff_meta.algorithms', 'tff_meta.baselines', 'tff_meta.registry',"
      " 'tff_meta.spelling']"
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
      case ast.ImportFrom(module=str(package), names=[ast.alias(text)]):
        is_whole = package.endswith(('.algorithms', '.baselines'))
      case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
        pass
      case ast.Name(text) | ast.Attribute(attr=text) | ast.arg(text):
        pass
      case ast.keyword(str(text)) | ast.Import([ast.alias(text)]):
        pass
      case _:
        continue
    for name in own:  # `cafeme_fed_rep` does not name `fed_rep`.
      text = re.sub(name, '', text, flags=re.IGNORECASE)
    for name in re.findall(
        rf'(?<![a-z0-9])({names})(?![a-z0-9])', text, re.IGNORECASE
    ):
      if name.lower() not in _ENGLISH or (is_whole and name == text):
        yield f'{path.relative_to(root)}:{node.lineno}: {name}'


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
