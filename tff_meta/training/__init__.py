"""Drives training: runs, checkpoints, metrics, evaluation of what came out."""
