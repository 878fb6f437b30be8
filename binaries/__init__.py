"""Command-line programs: `python -m binaries.train` and its siblings."""
