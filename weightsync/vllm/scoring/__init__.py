"""Log probabilities of given sequences, as an engine computes them with what it holds."""
