"""The flag files of `binaries/presets`, by name."""


def flag(name: str) -> str:
  """Returns the flag that reads a flag file.

  Args:
    name: Of the file, without its ending.
  """
  return f'--flagfile=binaries/presets/{name}.flags'
