"""What a process needs before it joins a Ray cluster; it knows no Ray.

Ray reads its settings when it is imported, ends the process where a file with
its token cannot be read, and tries for twenty seconds where the token is wrong.
So all that is looked at here, before.
"""

from collections.abc import Iterator, Mapping
import contextlib
import importlib.util
import os
import pathlib
import sys

from tff_meta import installation

_AUTH_MODE = 'RAY_AUTH_MODE'
_TOKEN = 'RAY_AUTH_TOKEN'
_TOKEN_PATH = 'RAY_AUTH_TOKEN_PATH'
_EXTRA = 'ray'
_MAKE_TOKEN = (
    'Tip: `RAY_AUTH_MODE=token ray get-auth-token --generate` makes'
    ' ~/.ray/auth_token on one host; copy it to the others.'
)
_TIMEOUT_SECONDS = 10.0
# Ray 2.52.1's question for the name of a cluster, which needs its token.
_QUESTION = '/ray.rpc.NodeInfoGcsService/GetClusterId'

# Ray and its processes, which inherit them, report to nobody, keep no metrics
# and no log of their own on the terminal, and leave the environment of workers
# without GPUs as it is.
_SETTINGS = {
    'RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO': '0',
    'RAY_BACKEND_LOG_LEVEL': 'fatal',
    # Without a cluster it is an error to use one, not one that begins.
    'RAY_ENABLE_AUTO_CONNECT': '0',
    'RAY_USAGE_STATS_ENABLED': '0',
    'RAY_enable_metrics_collection': '0',
}


class TokenError(ConnectionError):
  """There is no token for a Ray cluster, or another one is needed."""


def prepare_environment(more: Mapping[str, str] | None = None) -> None:
  """Sets what Ray reads when it is imported, where it is not set already.

  Args:
    more: Other environment variables that are to be set.
  """
  for name, value in (_SETTINGS | dict(more or {})).items():
    os.environ.setdefault(name, value)


@contextlib.contextmanager
def tokens() -> Iterator[None]:
  """Has clusters ask for a token meanwhile: who reaches their ports runs code.

  Unless `RAY_AUTH_MODE` is set. A Ray that was imported before has read it.
  """
  if _AUTH_MODE in os.environ:
    yield
    return
  os.environ[_AUTH_MODE] = 'token'
  try:
    yield
  finally:
    del os.environ[_AUTH_MODE]


def check_installed() -> None:
  """Raises if Ray, or one of the packages that it needs, is not as pinned.

  Raises:
    ImportError: It names what differs.
  """
  if importlib.util.find_spec('ray') is None:
    found = 'none'
  else:
    found = ', '.join(installation.differing_pins(_EXTRA))
  if found:
    raise ImportError(
        'Expected the package ray for execution on a Ray cluster, with what it'
        f' needs, found {found}. Tip: run `{sys.executable} -m pip install'
        ' --no-deps -r requirements-ray.txt` at the root of the repository or'
        ' of the source distribution: a wheel does not have that file.'
    )


def token() -> str | None:
  """Returns the token of this process, None where there are to be none.

  Raises:
    TokenError: If there is none, or its file cannot be read.
  """
  if not _has_tokens():
    return None
  if os.environ.get(_TOKEN, '').strip():
    return os.environ[_TOKEN].strip()
  named = os.environ.get(_TOKEN_PATH)
  path = pathlib.Path(named) if named else _default_path()
  try:
    found = path.read_text().strip()
  except FileNotFoundError:
    raise TokenError(
        f'Expected a token for the Ray cluster in {_TOKEN} or in {path}, found'
        f' none. {_MAKE_TOKEN}'
    ) from None
  except (OSError, UnicodeError) as error:
    raise TokenError(
        f'Expected to read a token for the Ray cluster, found {error}.'
    ) from error
  if not found:
    raise TokenError(
        f'Expected a token for the Ray cluster in {path}, found an empty file.'
        f' {_MAKE_TOKEN}'
    )
  return found


def check_answers(address: str) -> None:
  """Raises if a cluster does not take this process.

  Args:
    address: HOST:PORT of its head.

  Raises:
    ConnectionError: If nobody answers there, or it is no Ray cluster.
    TokenError: If the cluster has another token, or none.
  """
  own = token()
  problem = _ask(address, own)
  if problem == 'UNAUTHENTICATED':
    found = (
        'another one' if own else f'{_AUTH_MODE}={os.environ.get(_AUTH_MODE)}'
    )
    raise TokenError(
        f'Expected the token of the Ray cluster at {address}, found {found}.'
        " Tip: it is in ~/.ray/auth_token, or where the cluster's head has it;"
        f' copy that file, or set {_TOKEN_PATH} or {_TOKEN}.'
    )
  if problem:
    raise ConnectionError(
        f'Expected a Ray cluster at {address}, found that nobody answers as one'
        f' ({problem}). Tip: `python -m binaries.worker --head` begins one.'
    )
  if own and _ask(address, None) is None:
    raise TokenError(
        f'Expected the Ray cluster at {address} to ask for a token, found that'
        ' it takes everybody. Tip: begin it with python -m binaries.worker'
        f' --head; or set {_AUTH_MODE}=disabled here, too, if nobody else'
        ' reaches its ports.'
    )


def _has_tokens() -> bool:
  return os.environ.get(_AUTH_MODE, '').lower() == 'token'


def _default_path() -> pathlib.Path:
  return pathlib.Path.home() / '.ray' / 'auth_token'


def _ask(address: str, own: str | None) -> str | None:
  """Asks a cluster for its name; returns what went wrong, None for nothing."""
  import grpc

  with grpc.insecure_channel(
      address, [('grpc.enable_http_proxy', 0)]
  ) as channel:
    ask = channel.unary_unary(_QUESTION)
    metadata = [('authorization', f'Bearer {own}')] if own else []
    try:
      ask(b'', timeout=_TIMEOUT_SECONDS, metadata=metadata)
    except grpc.RpcError as error:
      code, details = error.code().name, error.details()
      if code == 'UNAUTHENTICATED':
        return code
      return f'{code}: {details}'
  return None
