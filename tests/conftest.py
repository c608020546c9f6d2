"""Settings of every test: one thread (tiny models lose time to more), case numbers, GPU tests on GPUs alone."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def case_numbers(request: pytest.FixtureRequest) -> str:
    """Those of a test marked with `case`, as they stand in its id."""
    numbers: str = request.param
    return numbers


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Begins the id of a test marked `case(5, 21)` with `case-05-case-21`; `tools/cases.py` says what these are."""
    numbers = numbers_of(metafunc.definition)
    if numbers:
        metafunc.fixturenames.append("case_numbers")
        metafunc.parametrize("case_numbers", ["-".join(f"case-{number:02}" for number in numbers)], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties += [("case", number) for number in numbers_of(item)]
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def numbers_of(test: pytest.Item) -> list[int]:
    """Of the cases that a test is marked with."""
    return sorted({number for mark in test.iter_markers("case") for number in mark.args})
