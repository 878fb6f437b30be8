"""Where a program's computations run."""

from typing import Any

import tensorflow_federated as tff


class ProgramContext(tff.program.FederatedContext):
  """Lets an ordinary context of TFF run the computations of a program.

  TFF's `NativeFederatedContext` takes the structs of clients apart, which the
  data of a client with examples, a salt and a memory do not survive. Here what
  a data source has selected stays whole, and results are there at once.
  """

  def __init__(self, context: tff.framework.SyncContext):
    """Wraps a context.

    Args:
      context: Runs computations, such as `in_process.InProcessContext()`.
    """
    self._context = context

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """Runs a computation; called by TFF.

    Args:
      comp: The computation.
      arg: Its argument, None without one.
    """
    return self._context.invoke(comp, arg)
