"""A few coefficients of a linear form, learnt from one number at a time while they drift: a Kalman filter.

What an automatic budget knows of the machine and of its drafter are two of these. Everything is float64 on the host.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


class Estimate:
    """Coefficients as a Gaussian: what they are held to be, and how surely.

    Attributes:
        mean: [K].
        covariance: [K, K].
    """

    def __init__(self, mean: ArrayLike, deviations: ArrayLike) -> None:
        self.mean: Vector = np.array(mean, dtype=np.float64)
        self.covariance: Matrix = np.diag(np.square(np.array(deviations, dtype=np.float64)))

    def value(self, terms: Vector) -> float:
        """The linear form at these terms, [K]."""
        return float(terms @ self.mean)

    def variance(self, terms: Vector) -> float:
        """How unsure that is."""
        return float(terms @ self.covariance @ terms)

    def learn(self, terms: Vector, error: float, noise: float) -> None:
        """Takes up one observation: how far it lies above `value(terms)`, and the variance of its own noise."""
        along = self.covariance @ terms
        gain = along / (float(terms @ along) + noise)
        self.mean += gain * error
        self.covariance -= np.outer(gain, along)

    def weigh(self, terms: Matrix, hits: Vector) -> None:
        """Takes up what happened, [M] of 0 and 1, where the linear form is the log-odds of it, at [M, K] terms.

        One Newton step on the likelihood of all of it together.
        """
        chances = 1 / (1 + np.exp(-terms @ self.mean))
        information = np.linalg.inv(self.covariance) + terms.T @ ((chances * (1 - chances))[:, None] * terms)
        self.covariance = np.asarray(np.linalg.inv(information), dtype=np.float64)
        self.mean += self.covariance @ (terms.T @ (hits - chances))

    def drift(self, covariance: Matrix) -> None:
        """The coefficients may have moved by a Gaussian of this covariance."""
        self.covariance += covariance
