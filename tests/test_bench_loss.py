"""`mrp bench loss`: the contenders, what cannot run, and the measurement of memory."""

import pytest
import torch
from linear_kl_cases import random_hidden

from mrp_trainer import linear_kl
from mrp_trainer.benchmarks.loss import bench_loss, main, naive_linear_kl, peak_memory


def test_peak_memory_includes_what_is_freed_again():
    """Two tensors of 1 MB exist together; or three exist one after the other."""

    def together():
        return torch.ones(2**18) + 1

    def in_turn():
        for _ in range(3):
            torch.ones(2**18)

    assert 2 * 2**20 <= peak_memory(together) < 2.1 * 2**20
    assert 2**20 <= peak_memory(in_turn) < 1.1 * 2**20


def test_naive_loss_of_the_benchmark_equals_linear_kl():
    inputs = random_hidden(4, 100, change=0.5)
    torch.testing.assert_close(naive_linear_kl(*inputs), linear_kl(*inputs), rtol=1e-4, atol=1e-6)


@pytest.fixture
def uncompiled(monkeypatch):
    """Make torch.compile fail: on a CPU it would take half a minute, and its failure must not affect other rows."""

    def no_compiler(function):
        def fail(*_):
            raise RuntimeError("no C++ compiler\nin this test")

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)


NAMES = ["naive", "compile", "liger", "ours", "ours+choice", "gemms", "gemms whole"]


def test_benchmark_reports_ratios_and_why_something_cannot_run(uncompiled):
    rows = {row["name"]: row for row in bench_loss(rows=64, vocab_size=2000, hidden_size=16, repeats=1, chunk_rows=4)}
    assert list(rows) == NAMES
    assert rows["compile"]["note"] == "no C++ compiler" and rows["compile"]["seconds"] is None
    assert rows["naive"]["time_ratio"] == rows["naive"]["memory_ratio"] == 1
    assert rows["ours"]["memory_ratio"] < 1 / 8
    ours = rows["ours"]
    assert ours["gemm_ratio"] == pytest.approx(ours["seconds"] / rows["gemms"]["seconds"])


def test_benchmark_prints_a_table(uncompiled, capsys):
    assert main(["--rows", "8", "--vocab-size", "100", "--hidden-size", "8", "--repeats", "1", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:11].strip() for line in lines[1:]] == NAMES


def test_error_of_a_contender_becomes_its_note(uncompiled, monkeypatch):
    def of_another_version(*_):
        raise TypeError("unexpected keyword 'jsd_beta'")

    monkeypatch.setattr("mrp_trainer.benchmarks.loss._liger_mean_kl", of_another_version)
    rows = {row["name"]: row for row in bench_loss(rows=4, vocab_size=100, hidden_size=8, repeats=1)}
    assert rows["liger"]["note"] == "unexpected keyword 'jsd_beta'"
    assert rows["ours"]["note"] is None
