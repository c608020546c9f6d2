"""The parts of `tools/soak.py`: what is held, what is done to it, what fails, and what is left in memory."""
