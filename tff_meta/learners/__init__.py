"""How a client learns from its examples, in pure TensorFlow."""
