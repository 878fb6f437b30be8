"""Ways to damage a directory: what disks, editors and other programs do."""

import os
import pathlib
import random
import shutil

_LINES = ('swap lines', 'repeat a line', 'drop a line')
_REPLACED = (
    'directory',
    'empty directory',
    'link to nothing',
    'link to a device',
    'link to itself',
    'pipe',
    'empty file',
)
KINDS = (
    'flip a bit',
    'flip bits',
    'change a digit',
    'cut off',
    'append',
    'zero a block',
    'delete',
    'another encoding',
    'random bytes',
    'another file',
    *_LINES,
    *_REPLACED,
)


def mutate(path: pathlib.Path, kind: str, rng: random.Random) -> None:
  """Damages a file.

  Args:
    path: The file.
    kind: One of `KINDS`.
    rng: Where and how.
  """
  content = bytearray(path.read_bytes())
  if kind in _REPLACED or kind == 'delete':
    path.unlink()
    _replace(path, kind)
    return
  size = len(content)
  if kind == 'flip a bit' and size:
    content[rng.randrange(size)] ^= 1 << rng.randrange(8)
  elif kind == 'flip bits' and size:
    for _ in range(rng.randint(2, 30)):
      content[rng.randrange(size)] ^= 1 << rng.randrange(8)
  elif kind == 'change a digit':
    places = [i for i, byte in enumerate(content) if byte in b'0123456789']
    if places:
      place = rng.choice(places)
      content[place] = rng.choice(
          [d for d in b'0123456789' if d != content[place]]
      )
  elif kind == 'cut off':
    content = content[: rng.randrange(size + 1)]
  elif kind == 'append':
    content += rng.choice([rng.randbytes(50), b'\0' * 4096, b'9,1\n', b'}'])
  elif kind == 'zero a block' and size:
    start = rng.randrange(size)
    content[start : start + 512] = bytes(len(content[start : start + 512]))
  elif kind == 'another encoding':
    text = content.decode('latin-1')
    content = text.encode(rng.choice(['utf-16', 'utf-32', 'utf-8-sig']))
  elif kind == 'random bytes':
    content = rng.randbytes(rng.randint(1, 5000))
  elif kind == 'another file':
    others = [p for p in sorted(path.parent.iterdir()) if p.is_file()]
    content = rng.choice(others).read_bytes()
  elif kind in _LINES:
    content = _mutate_lines(bytes(content), kind, rng)
  path.write_bytes(content)


def _replace(path, kind):
  if kind == 'directory':
    path.mkdir()
    (path / 'file').write_text('')
  elif kind == 'empty directory':
    path.mkdir()
  elif kind == 'link to nothing':
    path.symlink_to(path.with_name('nothing'))
  elif kind == 'link to a device':
    path.symlink_to('/dev/full')
  elif kind == 'link to itself':
    path.symlink_to(path)
  elif kind == 'pipe':
    os.mkfifo(path)
  elif kind == 'empty file':
    path.write_bytes(b'')


def _mutate_lines(content, kind, rng):
  lines = content.split(b'\n')
  i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
  if kind == 'swap lines':
    lines[i], lines[j] = lines[j], lines[i]
  elif kind == 'repeat a line':
    lines.insert(j, lines[i])
  else:
    del lines[i]
  return b'\n'.join(lines)


def mutate_directory(path: pathlib.Path, kind: str, rng: random.Random) -> None:
  """Damages a directory: it goes, or something else is in its place."""
  shutil.rmtree(path)
  if kind not in KINDS:
    raise ValueError(kind)
  _replace(path, kind if kind in _REPLACED else rng.choice(_REPLACED))


def state_of(root: pathlib.Path) -> dict[str, object]:
  """Returns what is in a directory: path -> bytes, or what else it is."""
  found = {}
  for path in sorted(root.rglob('*')):
    name = path.relative_to(root).as_posix()
    if path.is_symlink():
      found[name] = ('link', os.readlink(path))
    elif path.is_file():
      found[name] = path.read_bytes()
    else:
      found[name] = path.lstat().st_mode
  return found
