"""What `tools/bench.py` is made of: prompts, runs, speed, acceptance, exactness. Not part of the product."""
