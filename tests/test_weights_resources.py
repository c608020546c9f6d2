"""What a load leaves behind and uses up: modes, storage, host memory, the screen."""

import io
from pathlib import Path

import checkpoints as ck
import pytest
import torch
from safetensors.torch import save_file

from weights import load_target, read_target
from weights.shards import read_tensors


def test_a_loaded_model_is_in_eval_mode_without_gradients_and_disturbs_no_random_numbers(tmp_path: Path) -> None:
    ck.write_target(tmp_path)
    before = torch.get_rng_state()
    model = load_target(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in model.modules())
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


@pytest.mark.case(55)
def test_parameters_own_their_storage_and_survive_the_file(tmp_path: Path) -> None:
    tensors = ck.target_tensors(ck.target_config())
    file = ck.write_target(tmp_path, tensors) / "model.safetensors"
    model = load_target(tmp_path)
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(b"\xff" * size)
    ck.assert_holds(model, tensors)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


class Screen(io.StringIO):
    """A stderr that claims to be a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_bytes_on_a_terminal_and_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    ck.write_target(tmp_path)
    screen = Screen(terminal)
    monkeypatch.setattr("sys.stderr", screen)
    _, report = read_target(tmp_path)
    shown = screen.getvalue()
    assert (f"{report.nbytes / 1024:.0f}k/{report.nbytes / 1024:.0f}k" in shown) if terminal else shown == ""
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
def test_on_a_gpu_parameters_arrive_in_their_stored_type_and_host_memory_stays_flat(tmp_path: Path) -> None:
    config = ck.target_config(hidden_size=512, intermediate_size=2048, layer_types="lllf" * 6)
    tensors = {n: t if ck.is_island(n) else t.bfloat16() for n, t in ck.target_tensors(config).items()}
    ck.write(tmp_path, config, ck.as_stored(tensors))
    torch.zeros(1, device="cuda")
    before = anonymous_bytes()
    model, report = read_target(tmp_path, device="cuda")
    assert report.nbytes > 100 << 20 and anonymous_bytes() - before < 30 << 20
    assert report.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cuda" and parameter.dtype == tensors[name].dtype
        assert torch.equal(parameter.cpu(), tensors[name]), name
    hidden = model(torch.arange(20, device="cuda")[None]).final
    assert hidden.dtype == torch.bfloat16 and bool(hidden.isfinite().all())


def test_reading_a_big_file_keeps_one_tensor_resident(tmp_path: Path) -> None:
    """Pages of a mapped file stay resident while it is mapped; reading 24 tensors must not pile them up."""
    tensors = {f"t{i:02}": torch.full((1 << 20,), float(i)) for i in range(24)}
    save_file(tensors, tmp_path / "x.safetensors")
    del tensors
    peak = 0
    for i, (name, tensor) in enumerate(read_tensors(tmp_path / "x.safetensors", {f"t{i:02}" for i in range(24)})):
        assert name == f"t{i:02}" and float(tensor.sum()) == i * (1 << 20)
        peak = max(peak, mapped_bytes(tmp_path))
    assert 0 < peak <= 3 * (4 << 20)


def mapped_bytes(folder: Path) -> int:
    """Resident bytes of all mappings of files under a folder (Linux)."""
    total, ours = 0, False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        pytest.skip("needs /proc/self/smaps")
    for line in lines:
        if "-" in line.split(" ", 1)[0]:
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def anonymous_bytes() -> int:
    """Resident memory of this process that is no mapped file (Linux)."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10
