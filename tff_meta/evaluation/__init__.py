"""How good a trained model is for those it was trained for."""
