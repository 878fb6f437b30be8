"""The list of algorithms."""

import dataclasses
import inspect
import subprocess
import sys

import pytest

from tff_meta import registry
from tff_meta.algorithms import frl
from tff_meta.baselines import fed_avg
from tff_meta.baselines import personalized_fl

SPECS = registry.ALGORITHMS.values()


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
            'import collections, dataclasses\n\n'
            'class Parts(collections.namedtuple("Parts", "x")):\n  y: int\n\n'
            'PAPER = dataclasses.make_dataclass("C", ["mu", "epochs"])(1, 2)',
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
  spec = dataclasses.replace(
      registry.get('fed_avg'), module_name='their_module'
  )
  assert spec.hparam_names() == ('mu', 'epochs')
  assert ('their_module' in sys.modules) == is_imported


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
