"""Losses on embeddings, logits and weights, in pure TensorFlow."""
