"""Clients and groups made of corpora: NumPy and tf.data, no learning."""
