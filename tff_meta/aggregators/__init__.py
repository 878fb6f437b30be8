"""Aggregators that carry what meta-learning adds to a model update."""
