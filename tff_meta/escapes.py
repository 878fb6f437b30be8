"""Names as they are, wherever they are shown.

Methods, clients and what a program printed last may be called anything, so that
a name could be taken for a formula, for markup, or for mathematics.
"""

_BEGIN_FORMULAS = ('=', '+', '-', '@', '\t', '\r')


def csv_cell(value: object) -> object:
  """Returns a value as a cell of a CSV file that no spreadsheet computes.

  Args:
    value: Text, which gets an apostrophe before it if it begins as a formula
      does and is no number; anything else stays as it is.

  Source: OWASP, CSV Injection.
  """
  if not isinstance(value, str) or not value.startswith(_BEGIN_FORMULAS):
    return value
  try:
    float(value)
  except ValueError:
    return f"'{value}"
  return value


def markdown_line(text: str) -> str:
  """Returns text as one line of Markdown without HTML, links and pictures."""
  for char, escaped in (('&', '&amp;'), ('<', '&lt;'), ('[', r'\[')):
    text = text.replace(char, escaped)
  return one_line(text)


def one_line(text: str) -> str:
  """Returns text with single spaces for all that separates its words."""
  return ' '.join(text.split())


def picture_text(text: str) -> str:
  """Returns text as matplotlib draws it: between dollars it sees formulas."""
  return text.replace('$', r'\$')
