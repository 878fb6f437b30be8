"""What the machine allows, and what of it results depend on."""

from collections.abc import Sequence
import os
import pathlib
import re

ONEDNN = 'TF_ENABLE_ONEDNN_OPTS'
# Other kernels, or sums in another order: other last digits.
_OF_RESULTS = ONEDNN, 'TF_NUM_INTRAOP_THREADS'
_THREADS = 'TF_NUM_INTEROP_THREADS'
# As a container sees its own limit: version 2 of cgroups, then version 1.
_CGROUP_LIMITS = (
    '/sys/fs/cgroup/memory.max',
    '/sys/fs/cgroup/memory/memory.limit_in_bytes',
)


# How many clients, or groups, are computed at the same time: as many as there
# are cores, or operations that TensorFlow is told to run, but 2 to 16. What is
# computed does not depend on it.
CORES = len(os.sched_getaffinity(0))
PARALLEL = min(16, max(2, int(os.environ.get(_THREADS) or CORES)))


def environment() -> dict[str, str | None]:
  """Returns what of the environment results depend on, to the last bit.

  Returns:
    Name of a variable -> value, None for what TensorFlow sees fit.
  """
  return {name: os.environ.get(name) for name in _OF_RESULTS}


def processor(cpu_info: str = '/proc/cpuinfo') -> str | None:
  """Returns what the processor calls itself, None if it does not say.

  Args:
    cpu_info: The file in which the system describes it.
  """
  try:
    text = pathlib.Path(cpu_info).read_text(errors='replace')
  except OSError:
    return None
  found = re.search(r'^model name\s*:\s*(.+)$', text, re.MULTILINE)
  return found and found[1].strip()


def instructions(cpu_info: str = '/proc/cpuinfo') -> list[str]:
  """Returns the vector instructions that the processor has, sorted.

  TensorFlow and oneDNN choose kernels by them, with other rounding errors.

  Args:
    cpu_info: The file in which the system describes it.
  """
  try:
    text = pathlib.Path(cpu_info).read_text(errors='replace')
  except OSError:
    return []
  found = re.search(r'^flags\s*:(.+)$', text, re.MULTILINE)
  flags = set(found[1].split()) if found else set()
  return sorted(f for f in flags if f.startswith(('avx', 'amx', 'fma')))


def total_bytes(limit_files: Sequence[str] = _CGROUP_LIMITS) -> int:
  """Returns the machine's memory, or the container's if that is less.

  Args:
    limit_files: Files of which each may hold a number of bytes. One that does
      not exist, or says 'max', sets no limit.
  """
  sizes = [os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')]
  for path in map(pathlib.Path, limit_files):
    if path.exists() and (limit := path.read_text().strip()).isdecimal():
      sizes.append(int(limit))
  return min(sizes)


_shares = [1.0]  # The last one counts.


def take_share(share: float) -> None:
  """Leaves the rest of the memory to other processes of this machine.

  Args:
    share: This process's part of what `cache_bytes` is of, above 0, at most 1.
  """
  _shares.append(share)


def cache_bytes() -> int:
  """Returns the most that a cache takes unless told otherwise: a quarter."""
  return int(total_bytes() // 4 * _shares[-1])


def check_fits(num_bytes: int, what: str) -> None:
  """Raises a ValueError if data take more than half of the memory.

  Args:
    num_bytes: What they take, about.
    what: The file or folder.
  """
  most = total_bytes() // 2
  if num_bytes > most:
    raise ValueError(
        'Expected data that take at most half of the memory,'
        f' {most / 2**30:.1f} GiB, found {what}, which takes about'
        f' {num_bytes / 2**30:.1f} GiB. Tip: take fewer or smaller examples; a'
        ' `tff.simulation.datasets.ClientData` reads a client at a time, see'
        ' `FederatedDataset.from_client_data`.'
    )
