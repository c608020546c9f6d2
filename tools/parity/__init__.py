"""What the comparisons with transformers share: shapes, the other side, traces, reports. Not part of the product."""
