"""What the papers compare with; one paper, one file, shaped like algorithms."""
