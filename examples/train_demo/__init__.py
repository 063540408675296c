"""A vLLM learns from a request while it answers others. Run `python -m examples.train_demo`."""
