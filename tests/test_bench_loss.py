"""`mrp bench loss`: what it measures, and what it shows when an implementation cannot run."""

import pytest
import torch

from mrp_trainer.benchmarks.loss import bench_loss, naive_linear_kl, peak_memory
from mrp_trainer.commands.cli import main as mrp
from mrp_trainer.losses.linear_kl import linear_kl

NAMES = ["naive", "compile", "liger", "ours", "ours+choice", "gemms", "gemms whole"]


@pytest.fixture
def uncompiled(monkeypatch):
    """Make torch.compile fail: it takes half a minute on a CPU, and its failure must not affect the other rows."""

    def no_compiler(function):
        def fail(*_):
            raise RuntimeError("no C++ compiler\nin this test")

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)


def test_naive_loss_equals_the_fused_one():
    generator = torch.Generator().manual_seed(0)
    student, teacher, weight = (torch.randn(n, 16, generator=generator) for n in (4, 4, 100))
    torch.testing.assert_close(
        naive_linear_kl(student, teacher, weight), linear_kl(student, teacher, weight), rtol=1e-4, atol=1e-6
    )


def test_peak_memory_sees_what_is_freed_again():
    """Two tensors of 1 MB alive together; three of them one after the other."""

    def together():
        return torch.ones(2**18) + 1

    def in_turn():
        for _ in range(3):
            torch.ones(2**18)

    assert 2 * 2**20 <= peak_memory(together) < 2.1 * 2**20
    assert 2**20 <= peak_memory(in_turn) < 1.1 * 2**20


def test_benchmark_reports_ratios_and_why_something_cannot_run(uncompiled):
    rows = {row["name"]: row for row in bench_loss(rows=64, vocab_size=2000, hidden_size=16, repeats=1, chunk_rows=4)}
    assert list(rows) == NAMES
    assert rows["compile"]["note"] == "no C++ compiler" and rows["compile"]["seconds"] is None
    assert rows["naive"]["time_ratio"] == rows["naive"]["memory_ratio"] == 1
    assert rows["ours"]["memory_ratio"] < 1 / 8
    ours = rows["ours"]
    assert ours["gemm_ratio"] == pytest.approx(ours["seconds"] / rows["gemms"]["seconds"])


def test_benchmark_prints_a_table(uncompiled, capsys):
    sizes = ["--rows", "8", "--vocab-size", "100", "--hidden-size", "8", "--repeats", "1", "--device", "cpu"]
    assert mrp(["bench", "loss", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:11].strip() for line in lines[1:]] == NAMES


def test_chunks_of_no_row_are_not_taken_for_the_default(capsys):
    assert mrp(["bench", "loss", "--chunk-rows", "0", "--device", "cpu"]) == 2
    assert "--chunk-rows must be at least 1, got 0" in capsys.readouterr().err


def test_error_of_an_implementation_is_shown_as_its_note(uncompiled, monkeypatch):
    def of_another_version(*_):
        raise TypeError("unexpected keyword 'jsd_beta'")

    monkeypatch.setattr("mrp_trainer.benchmarks.loss._liger_mean_kl", of_another_version)
    rows = {row["name"]: row for row in bench_loss(rows=4, vocab_size=100, hidden_size=8, repeats=1)}
    assert rows["liger"]["note"] == "unexpected keyword 'jsd_beta'"
    assert rows["ours"]["note"] is None
