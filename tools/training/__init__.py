"""What the `tools/train_*.py` scripts share, from corpus to export. Not part of the product."""
