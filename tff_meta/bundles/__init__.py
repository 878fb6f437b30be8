"""A trained model as files that need TensorFlow alone."""
