"""Tokens of Ray clusters and questions to them, without Ray."""

from concurrent import futures
import importlib.metadata
import importlib.util
import os
import pathlib

import grpc
import pytest

from tff_meta.execution import ray_access

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  for name in ('RAY_AUTH_MODE', 'RAY_AUTH_TOKEN', 'RAY_AUTH_TOKEN_PATH'):
    monkeypatch.delenv(name, raising=False)


def _head(token):
  """A server that answers as the head of a cluster with a token does."""

  def answer(request, context):
    del request
    given = dict(context.invocation_metadata()).get('authorization')
    if token and given != f'Bearer {token}':
      context.abort(grpc.StatusCode.UNAUTHENTICATED, 'InvalidAuthToken')
    return b''

  server = grpc.server(futures.ThreadPoolExecutor(1))
  handler = grpc.unary_unary_rpc_method_handler(answer)
  server.add_generic_rpc_handlers(
      [
          grpc.method_handlers_generic_handler(
              'ray.rpc.NodeInfoGcsService', {'GetClusterId': handler}
          )
      ]
  )
  port = server.add_insecure_port('127.0.0.1:0')
  server.start()
  return server, f'127.0.0.1:{port}'


@pytest.fixture
def guarded():
  server, address = _head('right')
  yield address
  server.stop(None)


@pytest.fixture
def opened():
  server, address = _head(None)
  yield address
  server.stop(None)


def test_a_token_is_taken_from_where_ray_takes_it(tmp_path, monkeypatch):
  with ray_access.tokens():
    (tmp_path / '.ray').mkdir()
    (tmp_path / '.ray' / 'auth_token').write_text('of the home\n')
    assert ray_access.token() == 'of the home'
    (tmp_path / 'other').write_text('of a file')
    monkeypatch.setenv('RAY_AUTH_TOKEN_PATH', str(tmp_path / 'other'))
    assert ray_access.token() == 'of a file'
    monkeypatch.setenv('RAY_AUTH_TOKEN', 'given')
    assert ray_access.token() == 'given'
  assert ray_access.token() is None and 'RAY_AUTH_MODE' not in os.environ


def test_tokens_are_not_asked_for_where_they_are_switched_off(monkeypatch):
  monkeypatch.setenv('RAY_AUTH_MODE', 'disabled')
  with ray_access.tokens():
    assert ray_access.token() is None
  assert os.environ['RAY_AUTH_MODE'] == 'disabled'


@pytest.mark.parametrize('text', [None, ' \n', b'\xff'])
def test_a_missing_token_is_an_error_that_says_how_to_make_one(tmp_path, text):
  path = tmp_path / '.ray' / 'auth_token'
  path.parent.mkdir()
  if isinstance(text, bytes):
    path.write_bytes(text)
  elif text is not None:
    path.write_text(text)
  expected = 'utf-8' if text == b'\xff' else 'Tip: .*get-auth-token --generate'
  with ray_access.tokens():
    with pytest.raises(ray_access.TokenError, match=expected):
      ray_access.token()


def test_a_cluster_takes_its_own_token_only(guarded, monkeypatch):
  with ray_access.tokens():
    monkeypatch.setenv('RAY_AUTH_TOKEN', 'right')
    ray_access.check_answers(guarded)
    monkeypatch.setenv('RAY_AUTH_TOKEN', 'wrong')
    with pytest.raises(ray_access.TokenError, match='found another one'):
      ray_access.check_answers(guarded)
  monkeypatch.setenv('RAY_AUTH_MODE', 'disabled')
  with pytest.raises(ray_access.TokenError, match='RAY_AUTH_MODE=disabled'):
    ray_access.check_answers(guarded)


def test_a_cluster_that_takes_everybody_is_refused(opened, monkeypatch):
  monkeypatch.setenv('RAY_AUTH_TOKEN', 'mine')
  with ray_access.tokens():
    with pytest.raises(ray_access.TokenError, match='it takes everybody'):
      ray_access.check_answers(opened)
  monkeypatch.setenv('RAY_AUTH_MODE', 'disabled')
  ray_access.check_answers(opened)


def test_nobody_at_an_address_is_an_error(opened, monkeypatch):
  monkeypatch.setenv('RAY_AUTH_MODE', 'disabled')
  monkeypatch.setattr(ray_access, '_QUESTION', '/other.Service/Method')
  with pytest.raises(ConnectionError, match='UNIMPLEMENTED'):
    ray_access.check_answers(opened)
  monkeypatch.setattr(ray_access, '_TIMEOUT_SECONDS', 2.0)
  with pytest.raises(ConnectionError, match='nobody answers .*UNAVAILABLE'):
    ray_access.check_answers('127.0.0.1:1')


def test_without_ray_the_file_that_has_it_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ImportError, match='found none. Tip.*requirements-ray.tx'):
    ray_access.check_installed()


def test_another_ray_than_the_pinned_one_is_named(monkeypatch):
  pins = (_ROOT / 'requirements-ray.txt').read_text()
  assert 'ray==2.52.1\n' in pins
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: True)
  monkeypatch.setattr(
      importlib.metadata, 'requires', lambda name: ['x==2; extra == "ray"']
  )
  monkeypatch.setattr(importlib.metadata, 'version', lambda name: '1')
  with pytest.raises(ImportError, match=r'found x 1 \(pinned: 2\)'):
    ray_access.check_installed()
