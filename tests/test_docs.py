"""The pages: their generated parts, their Python and their commands.

A block of Python that begins with `# NAME.py` is a file; all others of a page
run one after the other, and so do blocks of commands after `<!-- run -->`;
after `<!-- run: slow -->` a block runs in slow tests only. The flags of all
commands are parsed, and the names in them looked up.
"""

import json
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys

import program_calls
import pytest

from binaries import experiments
from tff_meta import datasets
from tff_meta import models
from tff_meta import registry
from tff_meta.comparison import tables

_ROOT = pathlib.Path(__file__).parents[1]
_GENERATE = runpy.run_path(str(_ROOT / 'docs/generate.py'))
_PAGES = _GENERATE['pages']()
_BLOCK = re.compile(
    r'^(?:<!-- (?P<run>run|run: slow) -->\n)?```(?P<kind>python|sh)\n'
    r'(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
_PARSE = """
import importlib, json, sys
from absl import flags
from binaries import flag_files
name, calls = json.load(sys.stdin)
importlib.import_module(f'binaries.{name}')
parsed = []
for argv in calls:
  flags.FLAGS.unparse_flags()
  for flag in flags.FLAGS:
    flags.FLAGS[flag].unparse()
  rest = flags.FLAGS([name, *flag_files.expand(argv)])
  assert rest == [name], rest
  given = (flags.FLAGS[flag] for flag in flags.FLAGS)
  parsed.append({flag.name: flag.value for flag in given if flag.present})
print(json.dumps(parsed))
"""


def _blocks(page):
  return [match.groupdict() for match in _BLOCK.finditer(page.read_text())]


def _commands(text):
  """Returns the commands of a block, as lists of words."""
  lines = text.replace('\\\n', ' ').splitlines()
  return [words for words in map(shlex.split, lines) if words]


def _program(words):
  """Returns the program of `binaries` that a command calls, and its flags."""
  begin = ['./run', 'python', '-m']
  if words[:3] == begin and words[3].startswith('binaries.'):
    return words[3].removeprefix('binaries.'), words[4:]
  return None, words


def _id(page):
  return page.relative_to(_ROOT).as_posix()


@pytest.mark.parametrize('page', _PAGES, ids=_id)
def test_generated_parts_are_up_to_date(page):
  """Otherwise: `./run python docs/generate.py`."""
  text = page.read_text()
  assert _GENERATE['regenerated'](text) == text


@pytest.mark.parametrize(
    'page', sorted(_ROOT.glob('*.md')), ids=lambda page: page.name
)
def test_links_of_pages_beside_the_site_lead_to_files(page):
  links = re.findall(r'\]\((?!http)([^)#]*)', page.read_text())
  assert [link for link in links if not (_ROOT / link).exists()] == []


def test_every_algorithm_has_a_page_that_says_what_it_needs():
  for spec in registry.ALGORITHMS.values():
    module = spec.module_name.rpartition('.')[2]
    text = (_ROOT / f'docs/algorithms/{module}.md').read_text()
    for part in f'::: {spec.module_name}\n', f'needs | {module}', 'presets |':
      assert part in text, (spec.name, part)


@pytest.mark.ci
def test_the_cluster_of_kubernetes_has_what_its_operator_requires():
  """Fields without which KubeRay's RayCluster is refused, and their types."""
  yaml = pytest.importorskip('yaml')  # Comes with requirements-ray.txt.
  text = (_ROOT / 'docs/guide/cluster.md').read_text()
  (block,) = re.findall(r'```yaml\n(.*?)```', text, re.DOTALL)
  cluster = yaml.safe_load(block)
  assert (cluster['apiVersion'], cluster['kind']) == ('ray.io/v1', 'RayCluster')
  head, (workers,) = (
      cluster['spec'][name] for name in ('headGroupSpec', 'workerGroupSpecs')
  )
  for group in (head, workers):
    assert all(isinstance(v, str) for v in group['rayStartParams'].values())
    (container,) = group['template']['spec']['containers']
    assert container['name'] and container['image'] == 'IMAGE'
    assert container['command'] == ['tff-meta-worker']
  assert workers['groupName']
  assert workers['minReplicas'] <= workers['replicas'] <= workers['maxReplicas']
  pins = (_ROOT / 'requirements-ray.txt').read_text()
  assert f'ray=={cluster["spec"]["rayVersion"]}' in pins


def test_commands_have_flags_and_names_that_exist():
  calls = {}
  for page in _PAGES:
    for block in _blocks(page):
      for words in _commands(block['text']) if block['kind'] == 'sh' else ():
        name, flags = _program(words)
        if name:
          calls.setdefault(name, []).append(flags)
        else:
          assert words[0] in ('./run', 'pip', 'export'), words
          for option, value in zip(words, words[1:], strict=False):
            assert option != '-r' or (_ROOT / value).exists(), words
  assert set(calls) == {
      *('train', 'evaluate', 'compare', 'analyze', 'export', 'worker')
  }
  for name, of_program in calls.items():
    done = subprocess.run(
        [sys.executable, '-c', _PARSE],
        cwd=_ROOT,
        input=json.dumps([name, of_program]),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for values in json.loads(done.stdout):
      _check_names(values)


def _check_names(values):
  """Raises if a name among flags is of nothing; plugins bring their own."""
  if 'plugins' in values or values.get('experiment', '').endswith('.py'):
    return
  if 'algorithm' in values:
    registry.get(values['algorithm'])
  if 'dataset' in values:
    datasets.get(values['dataset'])
  if 'experiment' in values:
    assert tables.cells(
        experiments.get(values['experiment']),
        values.get('scale', 'cpu'),
        rows=values.get('rows', ()),
        settings=values.get('settings', ()),
        seeds=[int(seed) for seed in values.get('seeds', ())],
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
  """An empty working directory; what is imported from it is forgotten."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  modules, networks = set(sys.modules), dict(models.MODELS)
  yield tmp_path
  models.MODELS.clear()
  models.MODELS.update(networks)
  for name in set(sys.modules) - modules:
    if name.startswith('my_'):
      del sys.modules[name]


def _run(page, place, commands):
  """Runs a page from top to bottom, with those commands that are asked for."""
  names = {}
  for block in _blocks(page):
    text, file = block['text'], re.match(r'# (\w+\.py)\n', block['text'])
    if block['kind'] == 'python' and file:
      (place / file[1]).write_text(text)
      compile(text, file[1], 'exec')
    elif block['kind'] == 'python' and block['run'] in (None, *commands):
      exec(compile(text, _id(page), 'exec'), names)
    elif block['kind'] == 'sh' and block['run'] in commands:
      for words in _commands(text):
        name, flags = _program(words)
        ((code, _, error),) = program_calls.call_all(name, [flags], place)
        assert code == 0, error


def _with(*wanted):
  return [
      page
      for page in _PAGES
      if any(block['run'] in wanted for block in _blocks(page))
  ]


@pytest.mark.parametrize(
    'page',
    [
        pytest.param(
            page, marks=[] if page.name == 'README.md' else [pytest.mark.ci]
        )
        for page in _PAGES
        if page in _with('run')
        or any(block['kind'] == 'python' for block in _blocks(page))
    ],
    ids=_id,
)
def test_pages_run(page, place):
  _run(page, place, ('run',))


@pytest.mark.slow
@pytest.mark.parametrize('page', _with('run: slow'), ids=_id)
def test_pages_run_with_their_slow_commands(page, place):
  _run(page, place, ('run', 'run: slow'))


@pytest.mark.slow
def test_the_sample_algorithm_keeps_all_contracts(tmp_path):
  """By the command of its page."""
  page = _ROOT / 'docs/guide/your-algorithm.md'
  sample = next(b['text'] for b in _blocks(page) if 'MyConfig' in b['text'])
  (tmp_path / 'my_algorithm.py').write_text(sample)
  (command,) = re.findall(r'FOLDER ./run (pytest .*)', page.read_text())
  done = subprocess.run(
      [sys.executable, '-m', *shlex.split(command)],
      cwd=_ROOT,
      env=os.environ | {'PYTHONPATH': str(tmp_path)},
      stdout=subprocess.PIPE,
      text=True,
      timeout=1800,
  )
  assert done.returncode == 0 and ' passed' in done.stdout, done.stdout
