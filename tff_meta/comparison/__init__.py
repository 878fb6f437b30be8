"""Tables of papers: what is run for them, and what came out beside it."""
