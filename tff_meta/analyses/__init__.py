"""What the papers look at beside accuracy: embeddings, trajectories, leaks."""
