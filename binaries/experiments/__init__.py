"""The tables that `binaries.compare` runs, by name; a file a paper."""

from binaries.experiments import cafeme
from binaries.experiments import digits
from binaries.experiments import fedec
from binaries.experiments import fedmeta_per
from binaries.experiments import frl
from binaries.experiments import metavers
from tff_meta import spelling
from tff_meta.comparison import tables

TABLES: dict[str, tables.Table] = {
    table.name: table
    for module in (digits, fedmeta_per, metavers, fedec, cafeme, frl)
    for table in module.TABLES
}


def get(name: str) -> tables.Table:
  """Returns a table.

  Args:
    name: What `--experiment` takes.

  Raises:
    ValueError: If there is none of that name.
  """
  if name not in TABLES:
    raise ValueError(
        f'Expected an experiment of {", ".join(TABLES)}; found'
        f' {name!r}.{spelling.tip(name, TABLES)}'
    )
  return TABLES[name]
