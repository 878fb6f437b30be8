"""The five systems this library is about; one paper, one file."""
