"""Rounds and tests computed by workers of a Ray cluster.

The program that is started drives the rounds: it computes the server's part and
keeps what clients keep. Workers are Ray actors with TensorFlow; each computes a
shard of a round's clients (`shards`), or a call of a test, at a time. What a
round results in depends on the shards alone, so a worker that is lost costs the
shard that it was computing, which another one computes again.

The only module that imports Ray, which is an extra: requirements-ray.txt.
"""

import atexit
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import pickle
import shutil
import tempfile
import threading
import time
from typing import Any, NamedTuple
import uuid
import weakref

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_meta import dealing
from tff_meta import progress
from tff_meta import spelling
from tff_meta.data import federated_dataset
from tff_meta.execution import client_records
from tff_meta.execution import in_process
from tff_meta.execution import portable_values
from tff_meta.execution import ray_access
from tff_meta.execution import shard_worker
from tff_meta.execution import shards

ray_access.check_installed()
ray_access.prepare_environment()  # Which Ray reads when it is imported.
import ray  # noqa: E402

# Lines of Ray about what this module reports, or raises.
ray._private.worker._worker_logs_enabled = False

LOCAL = 'local'
_MOST_TRIES = 3
_MOST_NAMES = 5  # Of clients in a message.
_SECONDS_BETWEEN_LOOKS = 1.0
# Tasks for each worker, at most, that are handed out beyond the first that is
# not done: what they return is kept until it is its turn.
_MOST_AHEAD = 4
# Totals that are larger are merged by workers, not here.
_LARGE_BYTES = 10_000_000


class WorkersLostError(OSError):
  """No worker is left, none has come in time, or shards kill workers."""


# How Ray says that a worker is gone, or was never there.
_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.WorkerCrashedError,
)


class HostError(OSError):
  """A host has other software, settings or devices than the others."""


@dataclasses.dataclass(frozen=True)
class Options:
  """Where workers are, and what they get.

  Attributes:
    address: `'local'`, workers of this machine that end with this process;
      `'auto'`, the cluster that this machine belongs to; or HOST:PORT.
    workers: How many workers, at least 1.
    worker_cpus: CPU cores of a worker, at least 1: so many of its clients are
      computed at the same time.
    worker_gpus: GPUs of a worker, 0 or 1.
    worker_timeout_seconds: How long to wait where no worker is there, above 0.
    allow_mixed_hosts: Whether workers may have other versions, settings or
      devices than this process and each other. Results then depend on who
      computes what.
  """

  address: str = LOCAL
  workers: int = 2
  worker_cpus: int = 1
  worker_gpus: int = 0
  worker_timeout_seconds: float = 300.0
  allow_mixed_hosts: bool = False

  def __post_init__(self):
    if min(self.workers, self.worker_cpus) < 1 or self.worker_gpus not in (
        0,
        1,
    ):
      raise ValueError(
          'Expected `workers` and `worker_cpus` of at least 1 and `worker_gpus`'
          f' 0 or 1, found {self.workers}, {self.worker_cpus} and'
          f' {self.worker_gpus}.'
      )
    if not self.worker_timeout_seconds > 0:
      raise ValueError(
          'Expected `worker_timeout_seconds` above 0, found'
          f' {self.worker_timeout_seconds}.'
      )
    host, colon, port = self.address.rpartition(':')
    if self.address not in (LOCAL, 'auto') and not (
        host and colon and port.isdecimal()
    ):
      raise ValueError(
          "Expected the address of a Ray cluster, 'local', 'auto' or HOST:PORT,"
          f' found {self.address!r}.'
      )


class _Task(NamedTuple):
  """What a worker is to compute.

  Attributes:
    method: Name of a method of `shard_worker.Worker`.
    name: Its first argument, of what the worker has to be given before.
    arguments: The others.
    who: Whose it is, for messages.
    sources: Names of data sets that the worker has to be given before.
    stays_apart: Whether what it returns apart from its result stays where it
      is.
  """

  method: str
  name: str
  arguments: tuple[Any, ...]
  who: str
  sources: tuple[str, ...] = ()
  stays_apart: bool = False


class _Member:
  """A worker, as the pool sees it."""

  def __init__(self, actor: Any):
    self.actor = actor
    self.has: set[str] = set()
    self.gone: list[str] = []
    # Until it has started.
    self.host: str | None = None
    self.pid: int | None = None
    # Whether it has answered since a worker was lost: only then does it count
    # against a task that the worker has ended, too.
    self.is_alive = False


class RayPool:
  """Workers of a Ray cluster, as a `shards.Pool` and a `dealing.Dealer`."""

  def __init__(
      self,
      options: Options,
      batched_clients: int = 1,
      report: Callable[[str], None] = progress.write,
  ):
    """Connects to the cluster, or starts a local one, and asks for workers.

    Args:
      options: Where and how many.
      batched_clients: Clients that a worker computes together.
      report: Called with a line when workers come or go.

    Raises:
      ConnectionError: If there is no cluster at the address.
    """
    self._options = options
    self._report = report
    self._settings = shard_worker.Settings(
        on_gpu=options.worker_gpus > 0,
        parallel_clients=options.worker_cpus,
        batched_clients=batched_clients,
    )
    self._expected: Mapping[str, str] | None = None
    self._members: list[_Member] = []
    self._sent = _Sent()
    # Name -> method that gives it to a worker, and a reference to it.
    self._givens: dict[str, tuple[str, Any]] = {}
    self._sources: weakref.WeakKeyDictionary[Any, str] = (
        weakref.WeakKeyDictionary()
    )
    self._graphs: weakref.WeakKeyDictionary[Any, str] = (
        weakref.WeakKeyDictionary()
    )
    self._lock = threading.Lock()
    # What workers still compute of a round that has ended, for nobody.
    self._abandoned: dict[Any, _Member] = {}
    self._is_closed = False
    self._statistics: dict[str, float] = {}
    self._failed_starts = 0
    self._close_cluster = _connect(options)
    atexit.register(self.close)
    self._class = _actors(_Actor, options)
    self._starting: dict[Any, _Member] = {}
    for _ in range(options.workers):
      self._start_worker()

  def close(self) -> None:
    """Ends the workers, and the cluster if it is local."""
    if self._is_closed:
      return
    self._is_closed = True
    if dealing.dealer() is self:
      dealing.set_dealer(None)
    self._close_cluster()

  def processes(self) -> list[int]:
    """Returns the process numbers of the workers that there are."""
    return [m.pid for m in self._members if m.pid is not None]

  # As a pool.

  def prepare(self, computation, graph, total_bytes):
    """See `shards.Pool`."""
    kinds = shards.client_types(graph)
    is_large = total_bytes > _LARGE_BYTES

    def run(frontier, cohort, merge):
      self._check_open()
      arrays = [np.asarray(leaf) for leaf in frontier]
      self._count('bytes_down', sum(array.nbytes for array in arrays))
      reference = ray.put(arrays)
      for _ in range(_MOST_TRIES):
        outcomes = self._outcomes(name, reference, cohort, kinds, is_large)
        try:
          with contextlib.closing(outcomes):
            if not is_large:
              return shards.collected(map(_to_outcome, outcomes), merge)
            return self._merged_by_workers(name, outcomes)
        except ray.exceptions.ObjectLostError as error:
          # With a node that had totals of shards.
          self._report('Totals of shards are lost, all are computed again.')
          lost = error
      raise WorkersLostError(
          'Expected totals of shards to be kept, found them lost'
          f' {_MOST_TRIES} times.'
      ) from lost

    serialized = tff.framework.serialize_computation(computation)
    message = serialized.SerializeToString()
    name = self._give(run, 'add_computation', message)
    return run

  def _check_open(self) -> None:
    if self._is_closed:
      raise ValueError(
          'Expected workers that have not been ended, found that their pool is'
          ' closed. Tip: choose another execution context.'
      )

  def _outcomes(self, name, frontier, cohort, kinds, is_large):
    """Yields of every shard its result, and its total or where that lies."""

    def tasks():
      first = 0
      for values in cohort:
        task = self._shard_task(name, frontier, values, kinds, first)
        yield task._replace(stays_apart=is_large)
        first += len(values[0])

    for result, total in self._deal(tasks()):
      self._count('bytes_up', result.num_bytes + _num_bytes(result.kept))
      self._statistics['slowest_shard_seconds'] = max(
          result.seconds, self._statistics.get('slowest_shard_seconds', 0.0)
      )
      yield result, total

  def _merged_by_workers(self, name, outcomes) -> shards.Outcome:
    """Merges totals where they lie, in the order of `shards.collected`."""
    results, totals = zip(*outcomes, strict=True)
    while len(totals) > 1:
      odd = totals[len(totals) // 2 * 2 :]
      pairs = zip(totals[::2], totals[1::2], strict=False)
      tasks = [
          _Task('merge', name, pair, 'totals of shards', stays_apart=True)
          for pair in pairs
      ]
      totals = (*(total for _, total in self._deal(tasks)), *odd)
    columns = zip(*(result.kept for result in results), strict=True)
    return shards.Outcome(
        list(map(tf.constant, ray.get(totals[0]))),
        [list(itertools.chain(*parts)) for parts in columns],
    )

  def _shard_task(self, name, frontier, values, kinds, first) -> _Task:
    leaves = [
        [
            self._portable_leaves(v, kind, first + i)
            for i, v in enumerate(of_clients)
        ]
        for of_clients, kind in zip(values, kinds, strict=True)
    ]
    clients = list(zip(*leaves, strict=True))
    sources = {
        leaf.source
        for of_client in clients
        for part in of_client
        for leaf in part
        if isinstance(leaf, portable_values.ByName)
    }
    self._count('bytes_down', _num_bytes(leaves))
    names = [
        portable_values.client_id_of([x for part in of_client for x in part])
        or f'number {first + i} of the cohort'
        for i, of_client in enumerate(clients)
    ]
    return _Task(
        'compute_shard',
        name,
        (frontier, shard_worker.Shard(leaves, first)),
        _listed(names),
        tuple(sorted(sources)),
    )

  def _portable_leaves(self, value, kind, number):
    """Returns a client's value as it is sent, or says whose cannot be."""
    try:
      leaves = portable_values.leaves_of(value, kind)
      return [self._portable(leaf) for leaf in leaves]
    except (TypeError, ValueError) as error:
      raise type(error)(f'Client {number}: {error}') from error

  def _portable(self, leaf):
    """Returns a leaf as it is sent."""
    if isinstance(leaf, federated_dataset.NamedSequence):
      return portable_values.ByName(self._source(leaf.dataset), *leaf[1:])
    if isinstance(leaf, tf.data.Dataset):
      return self._sent.portable(leaf)
    return leaf

  def _source(self, dataset) -> str:
    if dataset not in self._sources:
      self._sources[dataset] = self._give(dataset, 'add_source', dataset)
    return self._sources[dataset]

  # As a dealer.

  def call_all(self, function, shared, calls):
    """See `dealing.Dealer`."""
    self._check_open()
    captured = list(function.captured_inputs)
    if any(tensor.dtype == tf.resource for tensor in captured):
      raise ValueError(
          'Expected a test without variables, to be dealt over workers, found'
          f' one with some: {function.name}. Tip: --execution=in_process.'
      )
    if function not in self._graphs:
      inputs = [tensor.name for tensor in function.inputs]
      num_own = len(inputs) - len(captured)
      graph = shard_worker.Graph(
          function.graph.as_graph_def().SerializeToString(),
          inputs[num_own:] + inputs[:num_own],
          [tensor.name for tensor in function.outputs],
      )
      self._graphs[function] = self._give(function, 'add_graph', graph)
    name = self._graphs[function]
    reference = ray.put([np.asarray(tensor) for tensor in captured + shared])

    def tasks():
      for inputs in calls:
        arrays = [np.asarray(tensor) for tensor in inputs]
        yield _Task('call', name, (reference, arrays), 'a test')

    for _, outputs in self._deal(tasks()):
      yield outputs

  def statistics(self):
    """See `dealing.Dealer`."""
    found, self._statistics = self._statistics, {}
    return found

  def status(self):
    """See `dealing.Dealer`."""
    hosts = {member.host for member in self._members if member.host}
    ready = sum(member.host is not None for member in self._members)
    return (
        f'{ready} of {spelling.counted(self._options.workers, "worker")} on'
        f' {spelling.counted(len(hosts), "host")}'
    )

  # The workers.

  def _give(self, owner: Any, method: str, value: Any) -> str:
    """Puts a value where workers can get it.

    Args:
      owner: With whom the value is forgotten.
      method: Of `shard_worker.Worker`, which takes it.
      value: What can be pickled.

    Returns:
      Its name.

    Raises:
      TypeError: If it cannot be pickled.
    """
    name = uuid.uuid4().hex
    try:
      self._givens[name] = method, ray.put(value)
    except TypeError as error:
      raise TypeError(
          'Expected what workers are given to be a value that Python can'
          f' pickle, found {type(value).__name__}: {error}'
      ) from error
    weakref.finalize(owner, self._forget, name).atexit = False
    return name

  def _forget(self, name: str) -> None:
    """Drops what was given; workers are told with their next task."""
    self._givens.pop(name, None)
    for member in list(self._members):
      if name in member.has:
        member.has.remove(name)
        member.gone.append(name)

  def _count(self, what: str, number: float) -> None:
    self._statistics[what] = self._statistics.get(what, 0) + number

  def _start_worker(self) -> None:
    member = _Member(self._class.remote(self._settings))
    self._members.append(member)
    self._ask(member)

  def _ask(self, member: _Member) -> None:
    """Asks a worker what it is; it gets nothing to do before it answers."""
    member.is_alive = False
    self._starting[member.actor.describe.remote()] = member

  def _welcome(self, reference: Any) -> None:
    """Takes in a worker that has answered, or says why it does not."""
    member = self._starting.pop(reference)
    if member not in self._members:  # It was lost meanwhile.
      return
    try:
      found = ray.get(reference)
    except _LOST as error:
      self._members.remove(member)
      self._start_worker()
      if member.host is None:
        self._failed_starts += 1
      else:  # It ended while it had nothing to do.
        self._report(
            f'A worker on {member.host} is lost. Left: {self.status()}.'
        )
      if self._failed_starts >= _MOST_TRIES * self._options.workers:
        raise WorkersLostError(
            f'Expected workers to start, found {self._failed_starts} that did'
            f' not, one after the other: {_last_line(error)}'
        ) from None
      return
    member.is_alive = True
    if member.host is not None:
      return
    host, member.pid = found['host'], int(found['pid'])
    if self._expected is None:
      self._expected = shard_worker.describe(found['device'])
    differences = [
        f'{name} {found[name]} (not {value})'
        for name, value in self._expected.items()
        if found[name] != value
    ]
    if differences and not self._options.allow_mixed_hosts:
      self._members.remove(member)
      message = (
          f'Expected {host} to have what this process and the other workers'
          f' have, found {", ".join(differences)}. Tip: --allow_mixed_hosts'
          ' takes it nevertheless; results then depend on who computes what.'
      )
      if not self._members:
        self._start_worker()  # Perhaps on another host.
        self._failed_starts += 1
        if self._failed_starts >= _MOST_TRIES:
          raise HostError(message)
      self._report(f'A worker is left out. {message}')
      return
    self._failed_starts = 0
    member.host = host
    ready = sum(m.host is not None for m in self._members)
    if ready == self._options.workers:
      self._report(f'Computing with {self.status()}.')

  def _lose(self, member: _Member) -> None:
    """Asks for another worker in place of one that is lost."""
    if member not in self._members:
      return
    self._members.remove(member)
    self._start_worker()
    # Others may be gone, too, with the same host.
    for other in self._members:
      if other.is_alive:
        self._ask(other)
    self._report(
        f'A worker on {member.host} is lost; what it had to compute is computed'
        f' again. Left: {self.status()}.'
    )

  def _deal(self, tasks: Iterable[_Task]) -> Iterator[tuple[Any, Any]]:
    """Yields the results of tasks, in order; whoever is idle takes the next.

    Args:
      tasks: Taken one by one, when somebody is idle.

    Yields:
      The result, and what the task returns apart from it, or a reference.

    Raises:
      WorkersLostError: If a task has ended several workers, there is none, or
        Ray fails otherwise.
      HostError: If the only host is not like this one.
      ObjectLostError: If what was to stay apart is lost.
      Exception: What a task raised.
    """
    with self._lock:
      running: dict[Any, tuple[_Member, int, _Task, Any]] = {}
      try:
        yield from self._deal_alone(enumerate(tasks), running)
      finally:
        for reference, (member, *_) in running.items():
          self._abandoned[reference] = member

  def _deal_alone(
      self,
      tasks: Iterator[tuple[int, _Task]],
      running: dict[Any, tuple[_Member, int, _Task, Any]],
  ) -> Iterator[tuple[Any, Any]]:
    """See `_deal`; `running` has what workers compute, by result."""
    item: tuple[int, _Task] | None
    again: collections.deque[tuple[int, _Task]] = collections.deque()
    tries: collections.Counter[int] = collections.Counter()
    done: dict[int, Any] = {}
    num_yielded = 0
    all_taken = False
    last_seen = time.monotonic()
    while True:
      busy = {id(member) for member, *_ in running.values()}
      busy |= set(map(id, self._abandoned.values()))
      for member in list(self._members):
        if not member.is_alive or id(member) in busy:
          continue
        if again:
          item = again.popleft()
        elif len(done) + len(running) >= _MOST_AHEAD * self._options.workers:
          break
        elif (item := next(tasks, None)) is None:
          all_taken = True
          break
        result, apart = self._hand(member, item[1])
        running[result] = member, *item, apart
      if all_taken and not running and not again:
        return
      for reference in self._wait(running):
        if reference in self._starting:
          self._welcome(reference)
        elif reference in self._abandoned:
          self._take_back(reference)
        else:
          member, number, task, apart = running.pop(reference)
          try:
            found = ray.get(reference)
            done[number] = found, apart if task.stays_apart else ray.get(apart)
            member.is_alive = True
          except ray.exceptions.RayTaskError as error:
            member.has.difference_update((task.name, *task.sources))
            raise _cause(error) from error
          except _LOST as error:
            tries[number] += member.is_alive
            self._lose(member)
            if tries[number] >= _MOST_TRIES:
              raise WorkersLostError(
                  f'Expected workers to compute {task.who}, found {_MOST_TRIES}'
                  ' that ended while they did. Tip: often a host has run out of'
                  ' memory.'
              ) from error
            again.appendleft((number, task))
          except ray.exceptions.ObjectLostError:
            if task.stays_apart:
              raise
            again.appendleft((number, task))
          except ray.exceptions.RayError as error:
            raise WorkersLostError(
                f'Expected Ray to compute {task.who}, found'
                f' {type(error).__name__}: {_last_line(error)}'
            ) from error
      while num_yielded in done:
        yield done.pop(num_yielded)
        num_yielded += 1
      now = time.monotonic()
      is_anybody_there = any(member.is_alive for member in self._members)
      if running or self._abandoned or is_anybody_there:
        last_seen = now
      elif now - last_seen > self._options.worker_timeout_seconds:
        raise WorkersLostError(_why_nobody(self._options))

  def _take_back(self, reference: Any) -> None:
    """Takes in a worker that has computed what nobody waits for."""
    member = self._abandoned.pop(reference)
    try:
      ray.get(reference)
    except _LOST:
      self._lose(member)
    except ray.exceptions.RayError:
      pass  # What a task raised.

  def _wait(self, running) -> list[Any]:
    """Returns what is ready, after a second at most."""
    references = [*running, *self._starting, *self._abandoned]
    if not references:
      time.sleep(_SECONDS_BETWEEN_LOOKS)
      return []
    ray.wait(references, timeout=_SECONDS_BETWEEN_LOOKS)
    # All that is: a worker that has started is not kept waiting by short tasks.
    ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
    return ready

  def _hand(self, member: _Member, task: _Task) -> list[Any]:
    """Gives a worker a task, and before it what the task needs.

    Returns:
      References to the result, and to what is apart from it.
    """
    after = []
    if member.gone:
      gone, member.gone = member.gone, []
      after.append(member.actor.forget.remote(gone))
    for name in (task.name, *task.sources):
      if name not in member.has:
        method, reference = self._givens[name]
        after.append(getattr(member.actor, method).remote(name, reference))
        member.has.add(name)
    compute = getattr(member.actor, task.method).options(num_returns=2)
    return compute.remote(task.name, *task.arguments, *after)


def _portable_errors(method: Callable[..., Any]) -> Callable[..., Any]:
  """Has a method raise nothing that cannot go to another process."""

  @functools.wraps(method)
  def raising(*args):
    try:
      return method(*args)
    except Exception as error:
      try:
        pickle.loads(pickle.dumps(error))
      except Exception:
        message = f'{type(error).__name__}: {error}'
        raise RuntimeError(message) from None
      raise

  return raising


class _Actor(shard_worker.Worker):
  """A worker that Ray starts."""

  def __init__(self, settings: shard_worker.Settings):
    if not settings.on_gpu:
      # Of its cores alone: each of TensorFlow's threads for all of the host's
      # cores would wake others up, in every worker (`benchmarks.distributed`).
      tf.config.threading.set_inter_op_parallelism_threads(
          settings.parallel_clients
      )
    super().__init__(settings, ray.get)

  compute_shard = _portable_errors(shard_worker.Worker.compute_shard)
  merge = _portable_errors(shard_worker.Worker.merge)
  call = _portable_errors(shard_worker.Worker.call)


class _Sent:
  """Data sets that go by value: those that come again lie with Ray."""

  def __init__(self):
    # By id: while it lives, and a reference once it came for the second time.
    self._known: dict[int, tuple[weakref.ref, Any]] = {}

  def portable(self, dataset: tf.data.Dataset) -> Any:
    """Returns the `Elements` of a data set, or where they lie."""
    key = id(dataset)
    if key not in self._known:
      lives = weakref.ref(dataset, lambda _: self._known.pop(key, None))
      self._known[key] = lives, None
      return portable_values.elements_of(dataset)
    lives, reference = self._known[key]
    if reference is None:
      elements = portable_values.elements_of(dataset)
      if not elements.is_only and not client_records.is_fixed(dataset):
        return elements  # It may have others next time.
      reference = portable_values.ByReference(
          uuid.uuid4().hex, ray.put(elements)
      )
      self._known[key] = lives, reference
    return reference


class Hosts:
  """Hosts of a cluster on which objects of any class are made."""

  def __init__(self, options: Options):
    """Connects to the cluster, or starts a local one.

    Args:
      options: Where, and what each object takes; `workers` is how many a local
        cluster has room for.

    Raises:
      ConnectionError: If there is no cluster at the address.
    """
    self._options = options
    self._close_cluster = _connect(options)
    self._last_seen = time.monotonic()

  def start(self, kind: type) -> 'Remote':
    """Makes an object as soon as a host has room.

    Args:
      kind: Its class, which hosts can import; made without arguments.
    """
    self._last_seen = time.monotonic()
    return Remote(self, _actors(kind, self._options).remote())

  def close(self) -> None:
    """Ends the objects, and the cluster if it is local."""
    self._close_cluster()

  def take(self, reference: Any, timeout: float | None) -> Any:
    """Returns a result, see `Answer`."""
    ready, _ = ray.wait([reference], timeout=timeout)
    now = time.monotonic()
    if not ready:
      if now - self._last_seen > self._options.worker_timeout_seconds:
        raise WorkersLostError(_why_nobody(self._options))
      raise TimeoutError
    try:
      result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
      cause = _cause(error)
      if isinstance(cause, OSError):
        raise ConnectionError(str(cause)) from error
      raise cause from error
    except ray.exceptions.RayError as error:
      raise ConnectionError(_last_line(error)) from error
    self._last_seen = now
    return result


class Remote:
  """An object on a host."""

  def __init__(self, hosts: Hosts, actor: Any):
    self._hosts = hosts
    self._actor = actor

  def call(self, method: str, *arguments: Any) -> 'Answer':
    """Calls a method; calls are done in order."""
    reference = getattr(self._actor, method).remote(*arguments)
    return Answer(self._hosts, reference)

  def end(self) -> None:
    """Ends it after the calls so far; waits for nothing."""
    self._actor.__ray_terminate__.remote()


class Answer:
  """What a call returns."""

  def __init__(self, hosts: Hosts, reference: Any):
    self._hosts = hosts
    self._reference = reference

  def get(self, timeout: float | None = None) -> Any:
    """Returns it.

    Args:
      timeout: Seconds; None to wait for it, however long.

    Raises:
      TimeoutError: If it is not there yet.
      ConnectionError: If the host is lost, or cannot read or write files.
      WorkersLostError: If no host has answered any call for too long.
      Exception: What the call has raised.
    """
    return self._hosts.take(self._reference, timeout)


def set_ray_context(
    options: Options,
    num_shards: int,
    *,
    devices: Sequence[str] = ('/CPU:0',),
    batched_clients: int = 1,
    report: Callable[[str], None] = progress.write,
) -> RayPool:
  """Makes TFF compute clients, and tests of them, with workers of Ray.

  Args:
    options: Where the workers are.
    num_shards: To how many shards a cohort is dealt, at least 1; several times
      as many as workers, so that none waits long for another. Results depend
      on it, to rounding, and on nothing else of all this.
    devices: Where the server's part is computed.
    batched_clients: Clients that a worker computes together.
    report: Called with a line when workers come or go.

  Returns:
    The pool; close it to end the workers.

  Raises:
    ConnectionError: If there is no cluster at the address.
    ValueError: If a number is out of range, or this process is in a cluster.
  """
  if num_shards < 1:
    raise ValueError(
        f'Expected `num_shards` of at least 1, found {num_shards}.'
    )
  if ray.is_initialized():
    raise ValueError(
        'Expected a process that is in no Ray cluster, found that it is in one'
        ' already. Tip: close the pool, or call `ray.shutdown()`.'
    )
  pool = RayPool(options, batched_clients, report)
  context = in_process.InProcessContext(
      devices, num_shards=num_shards, pool=pool
  )
  tff.framework.set_default_context(context)
  dealing.set_dealer(pool)
  return pool


def _actors(kind: type, options: Options) -> Any:
  """Returns what makes actors of a class, which Ray never makes again."""
  return ray.remote(kind).options(
      num_cpus=options.worker_cpus,
      num_gpus=options.worker_gpus,
      max_restarts=0,
      max_task_retries=0,
      scheduling_strategy='SPREAD',
  )


def _why_nobody(options: Options) -> str:
  has = {
      name: number
      for name, number in ray.cluster_resources().items()
      if name in ('CPU', 'GPU')
  }
  return (
      f'Expected a worker within {options.worker_timeout_seconds:g} seconds,'
      f' found none: a worker takes {options.worker_cpus} CPU and'
      f' {options.worker_gpus} GPU, the cluster has {has}. Tip: the same'
      ' command continues when there is one.'
  )


def _connect(options: Options) -> Callable[[], None]:
  """Connects to the cluster; returns what ends that."""
  quiet = dict(
      log_to_driver=False, logging_level='ERROR', configure_logging=False
  )
  with contextlib.ExitStack() as stack:
    stack.callback(_read_settings_again)
    if options.address == LOCAL:
      num_gpus = options.workers * options.worker_gpus
      found = len(tf.config.list_physical_devices('GPU'))
      if num_gpus > found:
        raise ValueError(
            f'Expected {num_gpus} GPUs of this machine for workers, found'
            f' {found} that TensorFlow can use.'
        )
      folder = tempfile.mkdtemp(prefix='tff_meta_ray_')
      stack.callback(shutil.rmtree, folder, ignore_errors=True)
      stack.callback(ray.shutdown)
      ray.init(
          LOCAL,
          num_cpus=options.workers * options.worker_cpus,
          num_gpus=options.workers * options.worker_gpus,
          include_dashboard=False,
          _node_ip_address='127.0.0.1',  # No other machine can connect.
          _temp_dir=folder,
          **quiet,
      )
    else:
      stack.enter_context(ray_access.tokens())
      _read_settings_again()
      stack.callback(ray.shutdown)
      _join(options.address, quiet)
    close = stack.pop_all().close
  return close


def _join(address: str, quiet: Mapping[str, Any]) -> None:
  """Connects to a cluster that is there."""
  # What 'auto' means; HOST:PORT stays, but for names of this machine.
  found = ray._private.services.canonicalize_bootstrap_address_or_die(address)
  ray_access.check_answers(found)
  try:
    ray.init(found, **quiet)
  except (ConnectionError, RuntimeError, ValueError) as error:
    # Ray looks for a minute for what a host of the cluster has.
    what = 'that this host is not in it' if _is_outside(error) else error
    raise ConnectionError(
        f'Expected to join the Ray cluster at {found}, found'
        f' {str(what) or "that Ray does not"}. Tip: the program has to run on'
        ' a host of the cluster, where python -m binaries.worker runs.'
    ) from error


def _is_outside(error: Exception) -> bool:
  return 'node_ip_address.json' in str(error)


def _read_settings_again() -> None:
  """Has Ray look whether it needs a token, and which: it does so once only."""
  ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
  ray._raylet.Config.initialize('')


def _to_outcome(result: tuple[shard_worker.ShardResult, Any]) -> shards.Outcome:
  """Gets the total of a shard."""
  own, total = result
  return shards.Outcome(list(map(tf.constant, total)), own.kept)


def _listed(clients: Sequence[str]) -> str:
  """Names clients, not too many of them."""
  shown = ', '.join(clients[:_MOST_NAMES])
  more = len(clients) - _MOST_NAMES
  return f'{spelling.counted(len(clients), "client")}: {shown}' + (
      f' and {more} more' if more > 0 else ''
  )


def _cause(error: Any) -> Exception:
  """What a task raised."""
  return error.cause if isinstance(error.cause, Exception) else error


def _last_line(error: Exception) -> str:
  return str(error).strip().splitlines()[-1]


def _num_bytes(value: Any) -> int:
  """What a value takes on its way, pickled."""
  buffers: list[pickle.PickleBuffer] = []
  pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
  return len(pickled) + sum(buffer.raw().nbytes for buffer in buffers)
