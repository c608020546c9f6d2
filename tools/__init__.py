"""Scripts around the packages: measuring, comparing, training. None of them is part of an installation."""
