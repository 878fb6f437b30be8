"""Where a TFF computation runs; algorithms never import this package."""
