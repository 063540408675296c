"""A model learns a sentence while vLLM generates with it. Run `python -m examples.demo`."""
